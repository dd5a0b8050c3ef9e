"""Settings of every test: no hub, one thread."""

import os

# Before anything imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch

# The models here are tiny, and threads that wait for each other on a busy machine cost more than they bring.
torch.set_num_threads(1)
