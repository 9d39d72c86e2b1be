"""Stager for torch.distributed.checkpoint.async_save of models with dynamic tables."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed._shard.sharded_tensor import custom_sharded_op_impl
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from torch_dynemb.torchrec.state.load_planner import table_prefixes


class Stager(BlockingAsyncStager):
    """Stager for ``dcp.async_save``: copies the state dict, so that training can go on.

    torch's own stager cannot copy ShardedTensors. ``model.state_dict()`` already copies dynamic
    tables, so on the CPU these copies are written without a second one. Everything else, including
    TorchRec's static tables, is copied to the CPU before ``async_save`` returns.

    Give ``async_save`` its own process group, because its thread communicates while training does.

    Example::

        group = dist.new_group(backend="gloo")  # once
        saving = dcp.async_save(
            {"model": model.state_dict()},
            checkpoint_id=path,
            async_stager=Stager(),
            process_group=group,
        )
        ...  # training steps
        saving.result()
    """

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict to write.

        Args:
            state_dict: nested dicts of tensors and ShardedTensors. Do not modify the result of a
                sharded model's ``state_dict()`` until the save has finished.

        Returns:
            New dicts with the same entries: those of dynamic tables on the CPU unchanged, and
            copies of all others on the CPU.
        """
        flat, paths = flatten_state_dict(state_dict)
        tables = tuple(table_prefixes(flat))
        ready = {
            key: value
            for key, value in flat.items()
            if key.startswith(tables) and _is_on_cpu(value)
        }
        others = {key: value for key, value in flat.items() if key not in ready}
        result: dict[str, Any] = {}
        for key, value in {**ready, **super().stage(others)}.items():
            set_element(result, paths[key], value)
        return result


def _is_on_cpu(value: Any) -> bool:
    if isinstance(value, ShardedTensor):
        return all(shard.tensor.device.type == "cpu" for shard in value.local_shards())
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


@custom_sharded_op_impl(torch.Tensor.data_ptr)  # type: ignore[untyped-decorator]
def _refuse_default_stager(types: Any, args: Any, kwargs: Any, process_group: Any) -> NoReturn:
    """Raise an error with the remedy if torch's stager asks for a ShardedTensor's memory."""
    raise RuntimeError(
        "data_ptr of a ShardedTensor: it has no memory of its own. In dcp.async_save, it is "
        "torch's default stager that cannot copy ShardedTensors: give async_save "
        "async_stager=torch_dynemb.torchrec.Stager()"
    )


__all__ = ["Stager"]
