"""Checkpoints of models in Hugging Face's accelerate, which writes those of its main process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from torch_dynemb.argument_checks import described
from torch_dynemb.checkpoint.loading.load import load
from torch_dynemb.checkpoint.saving.save import save
from torch_dynemb.nn.rank_states import savers_of_all_ranks

# Kinds of training in which accelerate leaves models to others: no hook gets their weights.
_OTHERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


def save_with(accelerator: Any) -> None:
    """Have ``save_state`` and ``load_state`` of accelerate save models by :func:`save`.

    accelerate writes the state dict of the main process only, so the rows of the other ranks would
    be lost: ``save_state`` raises where ranks share rows. From this call on, ``save_state`` and
    ``load_state`` save and load the prepared models with the rows of all ranks.
    The number of ranks may differ between them. Model ``i`` is in ``torch_dynemb_<i>`` of the
    folder. The rest, such as the state of optimizers, stays accelerate's.

    Call ``save_state`` on all ranks. It also copies the rows of each rank into memory, because
    accelerate asks each model for its state dict first.

    Args:
        accelerator: an ``accelerate.Accelerator``.

    Raises:
        TypeError: ``accelerator`` lacks hooks for its states.
        ValueError: accelerate leaves the models to FSDP, DeepSpeed or Megatron-LM.

    Example:
        >>> from accelerate import Accelerator  # doctest: +SKIP
        >>> accelerator = Accelerator()  # doctest: +SKIP
        >>> td.checkpoint.save_with(accelerator)  # doctest: +SKIP
        >>> accelerator.save_state("last")  # doctest: +SKIP
    """
    hooks = ("register_save_state_pre_hook", "register_load_state_pre_hook", "unwrap_model")
    if not all(callable(getattr(accelerator, name, None)) for name in hooks):
        raise TypeError(
            f"checkpoint.save_with: accelerator is {described(accelerator)}, expected an "
            "accelerate.Accelerator"
        )
    kind = getattr(accelerator.distributed_type, "value", accelerator.distributed_type)
    if kind in _OTHERS:
        raise ValueError(
            f"checkpoint.save_with: accelerator has distributed_type {kind}, expected ranks with "
            "DDP or one process: call checkpoint.save and checkpoint.load beside save_state and "
            "load_state"
        )

    def before_save(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        for number, model in enumerate(models):
            save(_place(folder, number), accelerator.unwrap_model(model))
        weights.clear()  # accelerate writes those that are left

    def before_load(models: list[nn.Module], folder: str) -> None:
        for number, model in enumerate(models):
            load(_place(folder, number), accelerator.unwrap_model(model))
        models.clear()

    savers_of_all_ranks.add(accelerator)
    accelerator.register_save_state_pre_hook(before_save)
    accelerator.register_load_state_pre_hook(before_load)


def _place(folder: str, number: int) -> Path:
    return Path(folder) / f"torch_dynemb_{number}"


__all__ = ["save_with"]
