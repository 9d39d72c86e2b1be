"""Prints what a result on this GPU is measured on, as JSON; check.py asks it."""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.common import machine


def main() -> None:
    if torch.version.cuda is None:
        sys.exit(f"torch {torch.__version__} has no CUDA")
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no GPU")
    print(json.dumps(machine.description("cuda")))


if __name__ == "__main__":
    main()
