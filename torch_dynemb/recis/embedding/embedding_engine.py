"""RecIS's EmbeddingEngine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from torch_dynemb.argument_checks import described
from torch_dynemb.distributed.agreement import Option, check_agreement, comparable
from torch_dynemb.distributed.ranks import process_group_of, rank_group
from torch_dynemb.nn.id_exchange import fail_insertion
from torch_dynemb.recis.embedding.feature_lookups import FeatureLookup, FeatureLookups
from torch_dynemb.recis.embedding.insertion import insert_rows
from torch_dynemb.recis.embedding.joint_lookup import Runtime
from torch_dynemb.recis.embedding.options import EmbeddingOption
from torch_dynemb.recis.embedding.physical_table import hash_table_of, physical_name
from torch_dynemb.recis.embedding.prepared import PreparedLookup, finished
from torch_dynemb.recis.tables.hash_table import HashTable


def _differences(one: EmbeddingOption, other: EmbeddingOption) -> str:
    """Return the names and values in which two options of one table differ."""
    first, second = json.loads(one.coalesced_info()), json.loads(other.coalesced_info())
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    said = [f"{name} is {first.get(name)} and {second.get(name)}" for name in names]
    return ", ".join(said) or "pg differs"


class EmbeddingEngine(FeatureLookups):
    """Embeddings of many features with few tables, few lookups and few exchanges.

    * Features with one ``shared_name`` share a logical table.
    * Logical tables with equal ``coalesced_info()`` of their options are one physical table.
    * Features of a physical table with equal ``runtime_info()`` are one lookup.

    Args:
        emb_options: by feature name.
        pg: process group; default: the options', else the default group if it is initialized.

    Raises:
        TypeError: ``emb_options`` is not a dict of EmbeddingOption.
        ValueError: features share a name, but their options are not those of one table; or ranks
            were given different options (all of them raise).

    Example:
        >>> import torch
        >>> engine = EmbeddingEngine({
        ...     "clicked": EmbeddingOption(embedding_dim=4, shared_name="item", combiner="mean"),
        ...     "candidate": EmbeddingOption(embedding_dim=4, shared_name="item"),
        ...     "user": EmbeddingOption(embedding_dim=4, shared_name="user"),
        ... })
        >>> features = {name: torch.tensor([[1, 2], [3, 4]]) for name in ("clicked", "candidate")}
        >>> features |= {"user": torch.tensor([[5], [6]]), "label": torch.ones(2)}
        >>> out = engine(features)
        >>> list(out), out["user"].shape, len(engine.tables)
        (['label', 'clicked', 'candidate', 'user'], torch.Size([2, 4]), 1)
    """

    def __init__(
        self,
        emb_options: Mapping[str, EmbeddingOption],
        pg: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(emb_options, Mapping):
            raise TypeError(
                f"EmbeddingEngine: emb_options is {described(emb_options)}, expected a dict of "
                "EmbeddingOption by feature name"
            )
        for name, option in emb_options.items():
            if not isinstance(option, EmbeddingOption):
                raise TypeError(
                    f"EmbeddingEngine: emb_options[{name!r}] is {described(option)}, expected an "
                    "EmbeddingOption"
                )
        if not emb_options:
            raise ValueError("EmbeddingEngine: emb_options is empty, expected at least one")
        _check_ranks_agree(emb_options, pg)
        by_table: dict[str, dict[str, EmbeddingOption]] = {}
        process_groups: dict[str, dist.ProcessGroup | None] = {}
        owners: dict[str, tuple[str, str]] = {}
        for name, option in emb_options.items():
            if option.children != [option.shared_name]:
                raise ValueError(
                    f"EmbeddingEngine: option {name!r} has children {option.children}, expected "
                    "none: the engine groups options that agree"
                )
            process_group = option.pg if pg is None else pg
            ranks = rank_group(process_group)
            table = physical_name(option, ranks)
            other, owner = owners.setdefault(option.shared_name, (name, table))
            if owner != table:
                raise ValueError(
                    f"EmbeddingEngine: options {other!r} and {name!r} share "
                    f"{option.shared_name!r}, but do not describe one table: "
                    f"{_differences(emb_options[other], option)}: make them equal, or give "
                    f"{name!r} another shared_name"
                )
            by_table.setdefault(table, {})[name] = option
            process_groups[table] = process_group
        self._ranks = {
            table: rank_group(process_group) for table, process_group in process_groups.items()
        }
        self._features: dict[str, FeatureLookup] = {}
        self.tables = nn.ModuleDict()
        for table, options in by_table.items():
            children = list(dict.fromkeys(option.shared_name for option in options.values()))
            self.tables[table] = hash_table_of(
                ", ".join(children),
                children,
                options,
                self._ranks[table],
                coalesced=True,
            )
            for name, option in options.items():
                child = children.index(option.shared_name)
                self._features[name] = FeatureLookup(table, child, replace(option, pg=None))
        # lookups in the order of the options, the same on all ranks
        self._lookups: dict[tuple[str, str], list[str]] = {}
        self._runtimes: dict[tuple[str, str], Runtime] = {}
        for name in emb_options:
            feature = self._features[name]
            alone = f" of {name}" if feature.option.no_reduce else ""
            key = (feature.table, feature.option.runtime_info() + alone)
            self._lookups.setdefault(key, []).append(name)
            self._runtimes[key] = Runtime.of(feature.option)

    def insert(self, feature: str, input_ids: Tensor, input_emb: Tensor) -> None:
        """Set rows of ids of a feature's table; see :meth:`DynamicEmbedding.insert`.

        Args:
            feature: its name in ``emb_options``.
            input_ids: int64 or int32 of any shape, n in all, distinct over all ranks.
            input_emb: float [n, dim].

        Raises:
            KeyError: the feature is unknown.
            TypeError, ValueError, RuntimeError: as :meth:`DynamicEmbedding.insert`.
        """
        owner, found = "EmbeddingEngine.insert: feature", self._features.get(feature)
        table = self._table(next(iter(self.tables)) if found is None else found.table)
        assert isinstance(table, HashTable)
        if found is None:
            expected = f"expected one of {list(self._features)}"
            error = KeyError(f"{owner} is {feature!r}, {expected}")
            fail_insertion(table.rank_group, error)
        child = found.option.shared_name
        insert_rows(f"{owner} {feature!r}", table, child, input_ids, input_emb)

    def exchange_ids(self, input_features: Mapping[str, Any]) -> PreparedLookup:
        """Send ids to the ranks that have their rows; pass the result to :meth:`forward`.

        Work between the two calls overlaps with the exchange.

        Args:
            input_features: by name, as :meth:`DynamicEmbedding.forward` takes them; other entries
                pass through.

        Raises:
            KeyError: a feature is missing.
            TypeError, ValueError: dtypes, shapes or devices do not match.
        """
        return self._prepared(input_features)

    def prefetch(self, input_features: Mapping[str, Any] | PreparedLookup) -> PreparedLookup:
        """Start to load rows of the next batch into memory; pass the result to :meth:`forward`.

        Ids go to the ranks that have their rows; all ranks make this call together. On these ranks,
        rows of tables with ``storage`` are loaded while the current batch is trained. No rows are
        inserted.

        Args:
            input_features: the argument of the next :meth:`forward`.

        Raises:
            KeyError: a feature is missing.
            TypeError, ValueError: dtypes, shapes or devices do not match.
            RuntimeError: a storage has failed, or a table with storage has no optimizer yet.

        Example:
            >>> import torch
            >>> engine = EmbeddingEngine({"user": EmbeddingOption(embedding_dim=4)})
            >>> ids = {"user": torch.tensor([[5], [6]])}
            >>> following = engine.prefetch(ids)
            >>> engine(following)["user"].shape
            torch.Size([2, 4])
        """
        if not isinstance(input_features, PreparedLookup):
            input_features = self.exchange_ids(input_features)
        for _, lookup in input_features.lookups:
            lookup.prefetch()
        return input_features

    def forward(self, input_features: Mapping[str, Any] | PreparedLookup) -> dict[str, Any]:
        """Look up and combine all features.

        Args:
            input_features: by name, as :meth:`DynamicEmbedding.forward` takes them; or the result
                of :meth:`exchange_ids`.

        Returns:
            Results by name, as from :meth:`DynamicEmbedding.forward`; other entries unchanged.

        Raises:
            KeyError: a feature is missing.
            TypeError, ValueError: dtypes, shapes or devices do not match.
        """
        if not isinstance(input_features, PreparedLookup):
            input_features = self.exchange_ids(input_features)
        return finished(input_features)


def _check_ranks_agree(
    options: Mapping[str, EmbeddingOption], pg: dist.ProcessGroup | None
) -> None:
    """Raise ValueError unless the ranks of each group have the same features in the same order."""
    by_ranks: dict[str, list[str]] = {}
    shared = {name: rank_group(option.pg if pg is None else pg) for name, option in options.items()}
    for name, ranks in shared.items():
        if ranks is not None:
            by_ranks.setdefault(ranks.name, []).append(name)
    for _, names in sorted(by_ranks.items()):  # in the same order on all ranks
        alike = {Option("", "names of emb_options"): comparable(names)}
        for name in names:
            alike |= options[name].described(name)
        check_agreement("EmbeddingEngine", alike, process_group_of(shared[names[0]]))


__all__ = ["EmbeddingEngine"]
