"""What the scripts that time prompts of equal chunks share: their options, the model, the file they leave."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import kvreuse as kr


def parser_of(about: str | None, name: str) -> argparse.ArgumentParser:
    """Options of model, machine and places; ``name``: of the JSON file under benchmarks/results."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/{name}.json"))
    return parser


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Options of one prompt and how much of it is recomputed."""
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--ratio", type=float, default=0.15)


def load(args: argparse.Namespace) -> kr.ReuseModel:
    """The model, at the threads asked for."""
    if args.threads:
        torch.set_num_threads(args.threads)
    return kr.load_model(args.model, device=args.device, dtype=args.dtype)


def save(out: Path, data: dict[str, Any]) -> None:
    """Write the JSON file; its folder is made."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(data, indent=1))
