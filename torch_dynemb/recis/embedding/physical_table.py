"""Hash tables made from options; options that agree share one table."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch_dynemb.distributed.ranks import RankGroup, process_group_of
from torch_dynemb.distributed.seed import common_start
from torch_dynemb.policy.admission import AdmissionRule
from torch_dynemb.recis.embedding.options import EmbeddingOption
from torch_dynemb.recis.initializers import seed_of
from torch_dynemb.recis.slices import gen_slice
from torch_dynemb.recis.tables.hash_table import HashTable
from torch_dynemb.recis.tables.hooks import READ_ONLY
from torch_dynemb.storage.tiers import Storage
from torch_dynemb.storage.tiers.sharing import part_of_storage


def _admissions(options: Mapping[str, EmbeddingOption]) -> dict[str, AdmissionRule]:
    """Return the admission rule of every child that has one.

    Raises:
        ValueError: features of one child have different rules.
    """
    rules: dict[str, tuple[str, AdmissionRule | None]] = {}
    for name, option in options.items():
        rule = None if option.admit_hook is None else option.admit_hook.make()
        if rule == READ_ONLY:
            continue
        for child in option.children:
            other, given = rules.setdefault(child, (name, rule))
            if given != rule:
                raise ValueError(
                    f"options {other!r} and {name!r} share {child!r}, but have the admission rules "
                    f"{given} and {rule}: give both one admit_hook, or one of them ReadOnly"
                )
    return {child: rule for child, (_, rule) in rules.items() if rule is not None}


def _storage(options: Mapping[str, EmbeddingOption]) -> Storage | None:
    """Return the storage of options that share a table.

    Raises:
        ValueError: their stores have one class, but are different objects.
    """
    storages = {name: option.storage for name, option in options.items()}
    first = next(iter(storages.values()))
    if any(storage != first for storage in storages.values()):
        raise ValueError(
            f"options {list(options)} share a table, but their storage is {storages}: give all of "
            "them one store, which gets the name of the logical table with every call"
        )
    return first


def hash_table_of(
    name: str,
    children: list[str],
    options: Mapping[str, EmbeddingOption],
    ranks: RankGroup | None,
    *,
    coalesced: bool,
) -> HashTable:
    """Make the physical table of options that agree.

    Args:
        name: of the table.
        children: names of its logical tables.
        options: by feature name, at least one.
        ranks: the ranks that share it; None: this process has the whole table.
        coalesced: whether there may be several children.

    Raises:
        ValueError: options contradict each other in settings of the whole table.
    """
    first = next(iter(options.values()))
    slots = {option.max_partition_num for option in options.values()}
    if len(slots) > 1:
        raise ValueError(
            f"options {list(options)} share a table, but their max_partition_num are "
            f"{sorted(slots)}, expected one number"
        )
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    storage = _storage(options)
    if storage is not None:
        storage = part_of_storage(storage, "", children, rank=rank, ranks=size)
    process_group = process_group_of(ranks)
    start = common_start(process_group, own_seed=seed_of(first.initializer))
    table = HashTable(
        [first.embedding_dim],
        block_size=max(option.block_size for option in options.values()),
        dtype=first.dtype,
        device=first.device,
        coalesced=coalesced,
        children=children,
        slice=gen_slice(rank, size, first.max_partition_num),
        initializer=first.initializer,
        name=name,
        grad_reduce_by=first.grad_reduce_by,
        filter_hook=first.filter_hook,
        admissions=_admissions(options),
        trainable=any(option.trainable for option in options.values()),
        max_rows=first.max_rows,
        storage=storage,
        seed=start.seed,
        now=None if process_group is None else start.now,
    )
    table.rank_group = ranks
    return table


def physical_name(option: EmbeddingOption, ranks: RankGroup | None) -> str:
    """Name the physical table of options that agree; the name is the same in every run."""
    shared = "" if ranks is None else f" over {ranks.name}"
    digest = hashlib.sha256((option.coalesced_info() + shared).encode()).hexdigest()[:8]
    dtype = str(option.dtype).removeprefix("torch.")
    return f"dim{option.embedding_dim}_{dtype}_{digest}"


__all__ = ["hash_table_of", "physical_name"]
