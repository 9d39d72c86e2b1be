"""``torch.distributed.checkpoint`` with modules of this package: its planner and its names.

``dcp.load`` reads into the tensors of a state dict, and refuses those of another size than the
saved ones. The entries of a table are as long as it has rows. So torch's DefaultLoadPlanner gets,
before it plans, tensors of the saved sizes in their place. Nothing is pickled, and beside the table
its state is in memory once, as for ``torch.load``.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torch_dynemb.nn.torch_changes import is_restored, replace
from torch_dynemb.table.state import entry_owners

_ANCHOR = "grad_anchor"  # the empty parameter of a module
_PLANNER = "torch.distributed.checkpoint.default_planner"
TakeSizes = Callable[[Any, dict[str, Any], Any], None]
_others: list[TakeSizes] = []


class StateNames:
    """Attributes for the names of entries that are not attributes of their module.

    ``torch.distributed.checkpoint.state_dict`` follows a name such as ``ads.buckets`` from the
    module by ``getattr``.
    """

    def __getattr__(self, name: str) -> StateNames:
        if name == "_fqn_modifiers" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return self


class _PlannerImport(importlib.abc.MetaPathFinder):
    """Has torch's planner changed as soon as a program imports it, which takes it half a second."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PLANNER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            _change_planner(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


@functools.cache
def support_default_planner() -> None:
    """Let torch's DefaultLoadPlanner load tables, from the first call in a process on."""
    loaded = sys.modules.get(_PLANNER)
    if is_restored("DefaultLoadPlanner"):
        return
    if loaded is None:
        sys.meta_path.insert(0, _PlannerImport())
    else:
        _change_planner(loaded)


def also_take_sizes(take: TakeSizes) -> None:
    """Let torch's DefaultLoadPlanner load tables with other entries than those of modules.

    Args:
        take: is called before each load with the planner, the nested state dict and the metadata of
            the checkpoint. It replaces entries of other sizes than the saved ones.
    """
    if take not in _others:
        _others.append(take)
    support_default_planner()


def _change_planner(module: Any) -> None:
    replace("DefaultLoadPlanner", module.DefaultLoadPlanner, "set_up_planner", _with_tables)


def _with_tables(set_up: Any) -> Any:
    @functools.wraps(set_up)
    def set_up_planner(
        self: Any,
        state_dict: dict[str, Any],
        metadata: Any = None,
        is_coordinator: bool = False,
    ) -> None:
        if metadata is not None:
            _take_saved_sizes(state_dict, metadata.state_dict_metadata)
            for take in _others:
                take(self, state_dict, metadata)
        set_up(self, state_dict, metadata, is_coordinator)
        if metadata is not None and self.flatten_state_dict:
            _leave_anchors_out(self.state_dict, metadata.state_dict_metadata)

    return set_up_planner


def _take_saved_sizes(state_dict: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Put tensors of the saved sizes in the place of the entries of tables.

    Args:
        state_dict: nested dicts, in which they are replaced.
        saved: what the checkpoint says of its entries.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    flat, mappings = flatten_state_dict(state_dict)
    formats = [key for key in flat if key == "format" or key.endswith(".format")]
    for prefix in (key.removesuffix("format") for key in formats):
        owners = entry_owners(flat[f"{prefix}format"])
        if owners is None:
            continue
        for key, value in flat.items():
            entry = saved.get(key)
            if (
                not key.startswith(prefix)
                or key[len(prefix) :].rpartition(".")[0] not in owners
                or type(value) is not Tensor
                or not isinstance(entry, TensorStorageMetadata)
                or entry.size == value.size()
            ):
                continue
            resized = torch.empty(entry.size, dtype=entry.properties.dtype, device=value.device)
            set_element(state_dict, mappings[key], resized)


def _leave_anchors_out(planned: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Do not ask a checkpoint for the optimizer state of anchors, which are empty.

    Training leaves them without a gradient, so without state. torch's ``get_state_dict`` gives
    every parameter state before it reads.

    Args:
        planned: entries to read, by flat name; changes in place.
        saved: what the checkpoint says of its entries.
    """
    for key in [k for k in planned if _ANCHOR in k.split(".") and k not in saved]:
        del planned[key]


__all__ = ["StateNames", "TakeSizes", "also_take_sizes", "support_default_planner"]
