"""Warning about a training loop that never calls ``optimizer.step()`` of a module's tables."""

from __future__ import annotations

import warnings
from typing import Any

# Updates without optimizer.step() from which on a module reports that the call is missing.
FORGOTTEN_STEPS = 16
# The same in split mode, where many micro-batches may be one step.
FORGOTTEN_SPLIT_STEPS = 256
# Lookups until which that is not reported again.
NEVER = -(1 << 62)


def count_lookup(module: Any) -> None:
    """Count a training lookup of a module with tables, and warn if a step is missing.

    Args:
        module: a ``TableModule``.
    """
    optimizer = module._optimizer
    if optimizer is None:
        return
    # Backwards are at most as many as lookups, and to read their number is two calls of torch.
    if optimizer.lookups_since_step >= module._most_backwards():
        backwards = report_forgotten_step(module)
        reported = backwards >= module._most_backwards()  # once, until the next step()
        optimizer.lookups_since_step = NEVER if reported else backwards
    optimizer.lookups_since_step += 1


def report_forgotten_step(module: Any) -> int:
    """Warn if ``optimizer.step()`` is missing; return how many backwards there were.

    Args:
        module: a ``TableModule``.
    """
    optimizer, config = module._optimizer, module.group.config
    if optimizer is None:
        return 0
    backwards: int = optimizer.updates_since_step()
    if backwards >= module._most_backwards():
        done = "have gathered gradients" if config.split else "have updated the rows"
        names = ", ".join(config.names[:3]) + (", ..." if len(config.names) > 3 else "")
        optimizer._accumulation_is_known()
        warnings.warn(
            f"{type(module).__name__} ({names}): {backwards} backwards {done} "
            f"{module._missing_step()}",
            RuntimeWarning,
            stacklevel=3,
        )
    return backwards


__all__ = ["FORGOTTEN_SPLIT_STEPS", "FORGOTTEN_STEPS", "count_lookup", "report_forgotten_step"]
