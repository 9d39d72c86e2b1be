"""Random numbers of tests."""

from __future__ import annotations

import torch


def seeded(seed: int) -> torch.Generator:
    """A generator of the default device, where tensors are drawn that name no other."""
    return torch.Generator(device=torch.get_default_device()).manual_seed(seed)
