"""Settings of every test: no hub, one thread."""

import os

# Before anything imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

import kvreuse as kr

# The models here are tiny, and threads that wait for each other on a busy machine cost more than they bring.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo_model() -> kr.ReuseModel:
    """The real demo model, where it has been fetched (`make test` fetches it)."""
    from kvreuse import demo

    if not demo._is_complete(demo.cache_folder() / demo._MODEL.folder, demo._MODEL):
        pytest.skip("the demo model is not in the cache: python -m kvreuse.demo")
    return kr.load_model("demo")
