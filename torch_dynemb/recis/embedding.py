"""RecIS's DynamicEmbedding and EmbeddingEngine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from torch_dynemb.argument_checks import described
from torch_dynemb.distributed.agreement import Option, check_agreement, comparable
from torch_dynemb.distributed.ranks import RankGroup, process_group_of, rank_group
from torch_dynemb.distributed.seed import common_start
from torch_dynemb.policy.admission import AdmissionRule
from torch_dynemb.recis.hash_table import HashTable
from torch_dynemb.recis.hooks import READ_ONLY
from torch_dynemb.recis.initializers import seed_of
from torch_dynemb.recis.launch import Launch, Request, Runtime
from torch_dynemb.recis.options import EmbeddingOption
from torch_dynemb.recis.ragged.bags import Ids, bags_of
from torch_dynemb.recis.slices import gen_slice


class PreparedLookup(NamedTuple):
    """Lookups whose ids are on their way to the ranks that have their rows.

    Attributes:
        launches: with the names of the features of each.
        passed: what is returned as it came.
    """

    launches: list[tuple[list[str], Launch]]
    passed: dict[str, Any]


def _admissions(options: Mapping[str, EmbeddingOption]) -> dict[str, AdmissionRule]:
    """The rule of every child that has one.

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


def _hash_table(
    name: str,
    children: list[str],
    options: Mapping[str, EmbeddingOption],
    group: RankGroup | None,
    *,
    coalesced: bool,
) -> HashTable:
    """The physical table of options that agree on what a table is."""
    first = next(iter(options.values()))
    slots = {option.max_partition_num for option in options.values()}
    if len(slots) > 1:
        raise ValueError(
            f"options {list(options)} share a table, but their max_partition_num are "
            f"{sorted(slots)}, expected one number"
        )
    ranks = process_group_of(group)
    start = common_start(ranks, own_seed=seed_of(first.initializer))
    table = HashTable(
        [first.embedding_dim],
        block_size=max(option.block_size for option in options.values()),
        dtype=first.dtype,
        device=first.device,
        coalesced=coalesced,
        children=children,
        slice=gen_slice(
            0 if group is None else group.rank,
            1 if group is None else group.size,
            first.max_partition_num,
        ),
        initializer=first.initializer,
        name=name,
        grad_reduce_by=first.grad_reduce_by,
        filter_hook=first.filter_hook,
        admissions=_admissions(options),
        trainable=any(option.trainable for option in options.values()),
        max_rows=first.max_rows,
        seed=start.seed,
        now=None if ranks is None else start.now,
    )
    table.rank_group = group
    return table


class DynamicEmbedding(nn.Module):
    """The embedding of one feature, on one process or over the ranks of a group.

    Over several ranks, an id's row lies on one of them: a rank sends the distinct ids of its batch
    to their owners, gets rows, and combines them. All ranks of the group make the same calls, also
    with an empty batch, backwards included.

    Args:
        emb_opt: what it is like.
        pg: process group; default: the option's, else the default group, if there is one.

    Example:
        >>> import torch
        >>> from torch_dynemb.recis import RaggedTensor
        >>> option = EmbeddingOption(embedding_dim=4, shared_name="item", combiner="mean")
        >>> items = DynamicEmbedding(option)
        >>> items(torch.tensor([[1, 2, 3], [4, 5, 6]])).shape
        torch.Size([2, 4])
        >>> items(RaggedTensor(torch.tensor([1, 2, 9]), torch.tensor([0, 0, 3]))).shape
        torch.Size([2, 4])
    """

    def __init__(self, emb_opt: EmbeddingOption, pg: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if not isinstance(emb_opt, EmbeddingOption):
            raise TypeError(
                f"DynamicEmbedding: emb_opt is {described(emb_opt)}, expected an EmbeddingOption"
            )
        pg = emb_opt.pg if pg is None else pg
        self._group = rank_group(pg)
        described_option = emb_opt.described(emb_opt.shared_name)
        check_agreement("DynamicEmbedding", described_option, process_group_of(self._group))
        self.emb_opt = replace(emb_opt, pg=None)  # a group cannot be copied or saved
        self.hashtable = _hash_table(
            emb_opt.shared_name,
            emb_opt.children,
            {emb_opt.shared_name: emb_opt},
            self._group,
            coalesced=emb_opt.coalesced,
        )
        self._runtime = Runtime.of(emb_opt)

    def exchange_ids(
        self, input_ids: Ids | Mapping[str, Ids], input_weights: Tensor | None = None
    ) -> PreparedLookup:
        """Sends ids to the ranks that have their rows; give the result to :meth:`forward`.

        What is done in between overlaps with the exchange. Arguments are those of ``forward``.
        """
        children = self.emb_opt.children
        features: Mapping[str, Ids]
        if isinstance(input_ids, Mapping):
            if sorted(input_ids) != sorted(children):
                raise KeyError(
                    f"DynamicEmbedding: input_ids has {sorted(input_ids)}, expected the children "
                    f"{sorted(children)}"
                )
            if input_weights is not None:
                raise ValueError(
                    "DynamicEmbedding: input_weights is given with several children, expected "
                    "RaggedTensors that have weights"
                )
            features = input_ids
        elif len(children) > 1:
            raise TypeError(
                f"DynamicEmbedding: input_ids is a {type(input_ids).__name__}, expected a dict of "
                f"ids by child, {children}"
            )
        else:
            features = {children[0]: input_ids}
        requests = {
            name: Request(
                children.index(name),
                bags_of(
                    f"DynamicEmbedding {self.emb_opt.shared_name!r}: input_ids",
                    ids,
                    input_weights,
                    use_weight=self.emb_opt.use_weight,
                ),
                self.emb_opt.tile_len,
            )
            for name, ids in features.items()
        }
        launch = Launch(self.hashtable, self._runtime, list(requests.values()), self._group)
        return PreparedLookup([(list(requests), launch)], {})

    def forward(
        self,
        input_ids: Ids | Mapping[str, Ids] | PreparedLookup,
        input_weights: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Looks ids up and combines the rows of each sample.

        Args:
            input_ids: int64 or int32 [..., L], the last dimension being a sample's ids; or a
                RaggedTensor, whose innermost rows they are; for several children a dict of them; or
                what :meth:`exchange_ids` gave.
            input_weights: float of the shape of dense ids, or [N] for the N values of a ragged
                tensor; it may get a gradient.

        Returns:
            float32 (float16 with ``fp16_enabled``): the shape of the ids without the last dimension
            + (dim,), or (tile_len * dim,). Of a ragged tensor, the shape is that of its dense form:
            rows that are not there give zeros. For several children a dict of them.

        Raises:
            TypeError, ValueError: dtypes, shapes or devices do not match.
        """
        if not isinstance(input_ids, PreparedLookup):
            input_ids = self.exchange_ids(input_ids, input_weights)
        elif input_weights is not None:
            raise ValueError(
                "DynamicEmbedding: input_weights is given with what exchange_ids() gave, expected "
                "there"
            )
        results = _finished(input_ids)
        if len(self.emb_opt.children) == 1:
            only: Tensor = results[self.emb_opt.children[0]]
            return only
        return results


def _finished(prepared: PreparedLookup) -> dict[str, Any]:
    """Results by name."""
    results = dict(prepared.passed)
    for names, launch in prepared.launches:
        results |= zip(names, launch.rows(), strict=True)
    return results


class _Feature(NamedTuple):
    """Where a feature of an engine is looked up.

    Attributes:
        table: name of the physical table.
        child: number of its logical table there.
        option: what it is like.
    """

    table: str
    child: int
    option: EmbeddingOption


class EmbeddingEngine(nn.Module):
    """Embeddings of many features: few tables, few launches, few exchanges.

    Features with one ``shared_name`` share a logical table. Logical tables whose options agree on
    ``coalesced_info()`` are one physical table; features of it that agree on ``runtime_info()`` are
    one launch.

    Args:
        emb_options: by feature name.
        pg: process group; default: the options', else the default group, if there is one.

    Raises:
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
        groups: dict[str, dist.ProcessGroup | None] = {}
        owners: dict[str, tuple[str, str]] = {}
        for name, option in emb_options.items():
            if option.children != [option.shared_name]:
                raise ValueError(
                    f"EmbeddingEngine: option {name!r} has children {option.children}, expected "
                    "none: the engine makes them of options that agree"
                )
            own = option.pg if pg is None else pg
            group = rank_group(own)
            table = _table_name(option, group)
            other, owner = owners.setdefault(option.shared_name, (name, table))
            if owner != table:
                raise ValueError(
                    f"EmbeddingEngine: options {other!r} and {name!r} share "
                    f"{option.shared_name!r}, but are not those of one table: "
                    f"{emb_options[other].coalesced_info()} and {option.coalesced_info()}"
                )
            by_table.setdefault(table, {})[name] = option
            groups[table] = own
        self._groups = {table: rank_group(own) for table, own in groups.items()}
        self._features: dict[str, _Feature] = {}
        self.tables = nn.ModuleDict()
        for table, options in by_table.items():
            children = list(dict.fromkeys(option.shared_name for option in options.values()))
            self.tables[table] = _hash_table(
                table, children, options, self._groups[table], coalesced=True
            )
            for name, option in options.items():
                child = children.index(option.shared_name)
                self._features[name] = _Feature(table, child, replace(option, pg=None))
        # launches in the order of the options, the same on all ranks
        self._launched: dict[tuple[str, str], list[str]] = {}
        self._runtimes: dict[tuple[str, str], Runtime] = {}
        for name in emb_options:
            feature = self._features[name]
            key = (feature.table, feature.option.runtime_info())
            self._launched.setdefault(key, []).append(name)
            self._runtimes[key] = Runtime.of(feature.option)

    def exchange_ids(self, input_features: Mapping[str, Any]) -> PreparedLookup:
        """Sends ids to the ranks that have their rows; give the result to :meth:`forward`.

        What is done in between overlaps with the exchange.

        Raises:
            KeyError: a feature is missing.
        """
        if not isinstance(input_features, Mapping):
            raise TypeError(
                f"EmbeddingEngine: input_features is {described(input_features)}, expected a dict "
                "of ids by feature name"
            )
        missing = [name for name in self._features if name not in input_features]
        if missing:
            raise KeyError(
                f"EmbeddingEngine: input_features lacks {missing}; it has {list(input_features)}"
            )
        launches = []
        for key, names in self._launched.items():
            table, _ = key
            requests = []
            for name in names:
                _, child, option = self._features[name]
                bags = bags_of(
                    f"EmbeddingEngine: feature {name!r}",
                    input_features[name],
                    None,
                    use_weight=option.use_weight,
                )
                requests.append(Request(child, bags, option.tile_len))
            hash_table = self.tables[table]
            assert isinstance(hash_table, HashTable)
            launch = Launch(hash_table, self._runtimes[key], requests, self._groups[table])
            launches.append((names, launch))
        passed = {k: v for k, v in input_features.items() if k not in self._features}
        return PreparedLookup(launches, passed)

    def forward(self, input_features: Mapping[str, Any] | PreparedLookup) -> dict[str, Any]:
        """Looks up and combines all features.

        Args:
            input_features: by name, as :meth:`DynamicEmbedding.forward` takes them; or what
                :meth:`exchange_ids` gave.

        Returns:
            By name, as :meth:`DynamicEmbedding.forward` gives them; entries that are no features
            as they came.

        Raises:
            KeyError: a feature is missing.
            TypeError, ValueError: dtypes, shapes or devices do not match.
        """
        if not isinstance(input_features, PreparedLookup):
            input_features = self.exchange_ids(input_features)
        return _finished(input_features)


def _check_ranks_agree(
    options: Mapping[str, EmbeddingOption], pg: dist.ProcessGroup | None
) -> None:
    """Raises ValueError unless the ranks of each group have the same features in one order."""
    by_group: dict[str, list[str]] = {}
    groups = {name: rank_group(of.pg if pg is None else pg) for name, of in options.items()}
    for name, group in groups.items():
        if group is not None:
            by_group.setdefault(group.name, []).append(name)
    for _, names in sorted(by_group.items()):  # in one order on all ranks
        alike = {Option("", "names of emb_options"): comparable(names)}
        for name in names:
            alike |= options[name].described(name)
        check_agreement("EmbeddingEngine", alike, process_group_of(groups[names[0]]))


def _table_name(option: EmbeddingOption, group: RankGroup | None) -> str:
    """Names the physical table of options that agree: the same in every run."""
    ranks = "" if group is None else f" over {group.name}"
    digest = hashlib.sha256((option.coalesced_info() + ranks).encode()).hexdigest()[:8]
    dtype = str(option.dtype).removeprefix("torch.")
    return f"dim{option.embedding_dim}_{dtype}_{digest}"


__all__ = ["DynamicEmbedding", "EmbeddingEngine", "PreparedLookup"]
