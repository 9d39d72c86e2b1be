"""Tables behind TorchRec's managed collision modules, which map ids to the rows of a static table.

``MCHManagedCollisionModule`` has these tensors; its last row serves all ids without a row:

* ``_mch_sorted_raw_ids``: ids, ascending
* ``_mch_remapped_ids_mapping``: the row of each id
* ``_mch_counts``, ``_mch_last_access_iter``: scores of its evictions

In ``HashZchManagedCollisionModule`` the id of row r is ``_hash_zch_identities[r]``; -1 is not an
id. See ``torchrec/modules/mc_modules.py`` and ``hash_mc_modules.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_dynemb.argument_checks import described
from torch_dynemb.migrate.source import Source
from torch_dynemb.migrate.tensors import TensorSource, read_tensors

_EMPTY = torch.iinfo(torch.int64).max  # in MCH's sorted ids
_IDS, _ROWS = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"
_COUNTS, _LAST, _ITER = "_mch_counts", "_mch_last_access_iter", "_current_iter_tensor"
_IDENTITIES, _RUNTIME = "_hash_zch_identities", "_hash_zch_runtime_meta"

Module = nn.Module | Mapping[str, Tensor]
Weight = nn.Embedding | nn.EmbeddingBag | Tensor


def read_torchrec_mch(
    module: Module,
    weight: Weight,
    *,
    state: Mapping[str, Tensor] | None = None,
    optimizer_steps: int | None = None,
) -> Source:
    """Read the table behind a TorchRec ``MCHManagedCollisionModule``, for :func:`load`.

    Ids with a row of their own are read; the row that all other ids share is not. Counts of LFU
    and DistanceLFU become frequencies. The last iteration of LRU and DistanceLFU becomes a step.
    Join the state of all shards before the call, as in their state dict: ids [rows], rows and
    counts.

    Args:
        module: the module, or its state dict.
        weight: the table that it maps to: float [zch_size, dim], or a module with such a weight.
        state: optimizer state of the table, by the dynamic table's name of it: [zch_size, dim]
            each, or [zch_size] if a row has one value, such as ``{"sum": momentum1}`` of row-wise
            Adagrad.
        optimizer_steps: as in :func:`read_tensors`.

    Returns:
        The source. It has copies of the rows of its ids.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the module hashes ids before lookups, or its tensors do not fit the table.

    Example:
        >>> import torch, torch_dynemb as td
        >>> from torch_dynemb import migrate
        >>> saved = {
        ...     "_mch_sorted_raw_ids": torch.tensor([7, 55, 2**63 - 1]),
        ...     "_mch_remapped_ids_mapping": torch.tensor([1, 0, 2]),
        ... }
        >>> static = torch.nn.Embedding(3, 4)
        >>> items = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
        >>> report = migrate.load(items, migrate.read_torchrec_mch(saved, static))
        >>> torch.equal(items(torch.tensor([55])), static(torch.tensor([0])))
        True
    """
    call = "read_torchrec_mch"
    found = _tensors(call, module, (_IDS, _ROWS))
    if getattr(module, "_input_hash_func", None) is not None:
        raise ValueError(
            f"{call}: the module hashes ids before it looks them up (input_hash_func), and knows "
            "no others: give its state dict in its place, and hash ids in the same way for the "
            "dynamic table"
        )
    ids, rows = found[_IDS].reshape(-1), found[_ROWS].reshape(-1)
    values = _weight(call, weight)
    offset = int(getattr(module, "_output_global_offset", 0))
    rows = rows - offset
    if ids.shape != rows.shape or values.shape[0] != ids.numel():
        raise ValueError(
            f"{call}: {_IDS} has {ids.numel()} ids and {_ROWS} {rows.numel()} rows, but weight has "
            f"{values.shape[0]} rows: give the table that the module maps to"
        )
    if rows.numel() > 0 and not 0 <= int(rows.min()) <= int(rows.max()) < values.shape[0]:
        wrong = int(rows.min()) if int(rows.min()) < 0 else int(rows.max())
        raise ValueError(
            f"{call}: {_ROWS} has row {wrong + offset}, expected {offset} to "
            f"{offset + values.shape[0] - 1}: give the whole state, not that of one shard"
        )
    used = ids != _EMPTY
    used[-1:] = False  # the last row serves ids without a row
    rows = rows[used]
    scores = {}
    if _COUNTS in found:
        scores["frequency"] = found[_COUNTS].reshape(-1)[used]
    if _LAST in found:
        scores["step"] = found[_LAST].reshape(-1)[used]
    source = _source(call, ids[used], values, rows, state, scores, optimizer_steps)
    if _ITER in found:
        source.step = int(found[_ITER].max())
    return source


def read_torchrec_hash_zch(
    module: Module,
    weight: Weight,
    *,
    state: Mapping[str, Tensor] | None = None,
    optimizer_steps: int | None = None,
) -> Source:
    """Read the table behind a TorchRec ``HashZchManagedCollisionModule``, for :func:`load`.

    Frequencies are read if the module tracks them (``track_id_freq=True``). Times for its
    evictions are not read. The id -1 marks an empty row.

    Args:
        module: the module, or its state dict, which lacks the flag of tracked frequencies.
        weight: the table that it maps to: float [zch_size, dim], or a module with such a weight.
        state: as in :func:`read_torchrec_mch`.
        optimizer_steps: as in :func:`read_tensors`.

    Returns:
        The source. It has copies of the rows of its ids.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the module's tensors do not fit the table.

    Example:
        >>> import torch, torch_dynemb as td
        >>> from torch_dynemb import migrate
        >>> saved = {"_hash_zch_identities": torch.tensor([[40], [-1], [2**50]])}
        >>> items = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
        >>> source = migrate.read_torchrec_hash_zch(saved, torch.randn(3, 4))
        >>> migrate.load(items, source)["embedding"].ids
        2
    """
    call = "read_torchrec_hash_zch"
    found = _tensors(call, module, (_IDENTITIES,))
    ids = found[_IDENTITIES].reshape(-1)
    values = _weight(call, weight)
    if values.shape[0] != ids.numel():
        raise ValueError(
            f"{call}: {_IDENTITIES} has {ids.numel()} ids, but weight has {values.shape[0]} rows: "
            "give the table that the module maps to"
        )
    rows = (ids != -1).nonzero()[:, 0]
    scores = {}
    if getattr(module, "_track_id_freq", False):
        scores["frequency"] = found[_RUNTIME].reshape(-1)[rows]
    return _source(call, ids[rows], values, rows, state, scores, optimizer_steps)


def _tensors(call: str, module: object, needed: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors of a module by the last part of their names."""
    if isinstance(module, nn.Module):
        module = {**module.state_dict(), **dict(module.named_buffers(recurse=False))}
    if not isinstance(module, Mapping):
        raise TypeError(
            f"{call}: module is {described(module)}, expected a managed collision module or its "
            "state dict"
        )
    found: dict[str, Tensor] = {}
    for name, value in module.items():
        last = str(name).rpartition(".")[2]
        if isinstance(value, Tensor) and last in found and last.startswith("_"):
            raise ValueError(f"{call}: module has two tensors {last!r}: give that of one table")
        if isinstance(value, Tensor):
            found[last] = value.detach().cpu()
    for name in needed:
        if name not in found:
            raise ValueError(f"{call}: module has no tensor {name!r}, only {sorted(found)}")
        if found[name].dtype != torch.int64:
            raise TypeError(f"{call}: {name} is {described(found[name])}, expected int64")
    return found


def _weight(call: str, weight: Any) -> Tensor:
    values = weight.weight if isinstance(weight, nn.Embedding | nn.EmbeddingBag) else weight
    if not isinstance(values, Tensor) or values.dim() != 2:
        raise TypeError(f"{call}: weight is {described(values)}, expected float [rows, dim]")
    return values.detach().cpu()


def _source(
    call: str,
    ids: Tensor,
    weight: Tensor,
    rows: Tensor,
    state: Mapping[str, Tensor] | None,
    scores: Mapping[str, Tensor],
    optimizer_steps: int | None,
) -> TensorSource:
    of_rows = {}
    for name, values in (state or {}).items():
        if values.dim() == 0 or values.shape[0] != weight.shape[0]:
            raise ValueError(
                f"{call}: state[{name!r}] has shape {tuple(values.shape)}, expected "
                f"{weight.shape[0]} rows, as many as weight has"
            )
        of_rows[name] = values.detach().cpu()[rows]
    return read_tensors(
        ids,
        weight[rows],
        state=of_rows,
        scores=scores,
        optimizer_steps=optimizer_steps,
        name=call,
    )


__all__ = ["read_torchrec_hash_zch", "read_torchrec_mch"]
