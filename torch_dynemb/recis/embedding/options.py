"""RecIS's EmbeddingOption: the options of one feature's embedding."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
import torch.distributed as dist

from torch_dynemb.argument_checks import described, flag, integer, text
from torch_dynemb.distributed.agreement import Described, Option, comparable
from torch_dynemb.initializers import Constant, Initializer
from torch_dynemb.ops.columns import MAX_ROWS
from torch_dynemb.policy import Policy
from torch_dynemb.recis.functional.combiners import OWN_COMBINERS, combiner_names
from torch_dynemb.recis.tables.arguments import check_grad_reduction, check_storage_on
from torch_dynemb.recis.tables.hooks import READ_ONLY, AdmitHook, FilterHook
from torch_dynemb.storage.device import device_of
from torch_dynemb.storage.tiers import Storage
from torch_dynemb.table.config import ROW_DTYPES

_NOT_ALIKE = ("block_size", "device", "pg")


@dataclass(eq=False)
class EmbeddingOption:
    """Options of one feature's embedding.

    Args:
        embedding_dim: columns of a row.
        block_size: ids for which a new table's index has room before it first grows. It does not
            affect rows, which take memory page by page.
        dtype: of the rows: float32, bfloat16, float16; or int8 with a float32 scale per row, for
            rows that are inserted by :meth:`HashTable.insert` and never trained.
        device: of the rows.
        trainable: False: the output has no gradient, and new ids get no row.
        pg: process group of the ranks that share the table; None: the default group if it is
            initialized.
        max_partition_num: number of slots into which ids are hashed. Ranks own ranges of slots
            (:func:`gen_slice`), so it limits their number.
        shared_name: name of the table; features with one name share it.
        children: logical tables of one physical table, each with its own ids (all 64 bits);
            default: ``[shared_name]``.
        coalesced: whether there may be several children.
        initializer: of new rows; default ``Constant(0)``.
        use_weight: False: weights of ids are ignored.
        combiner: reduction of the rows e_i of a sample, with weights w_i. ``"sum"``: of w_i e_i.
            ``"mean"``: the sum divided by the sum of w_i, or by the count without weights.
            ``"tile"``: the first ``combiner_kwargs["tile_len"]`` rows side by side, each times its
            weight, then zeros. An empty sample gives 0. Other names are those of
            :func:`torch_dynemb.recis.functional.register_combiner`. To keep the row of every id,
            give each a bag of its own: ``RaggedTensor(ids, [row_splits, torch.arange(n + 1)])`` of
            n ids, which becomes [samples, longest, dim]. Or see ``no_reduce``.
        combiner_kwargs: of the combiner.
        grad_reduce_by: gradient of an id over ranks. ``"worker"``: the sum divided by the number of
            ranks. ``"id"``: the sum divided by the number of ranks that sent the id in the same
            lookup, that of features with equal :meth:`runtime_info`.
        filter_hook: removes rows periodically.
        admit_hook: decides which new ids get a row.
        max_rows: rows to reserve address space for; default: as many as fill the device's memory,
            or fewer if many tables share the process's addresses. Tables must agree on it to share
            a physical table.
        storage: store of rows beyond those in the memory of the device; None: all rows are in
            memory. Tables must agree on it to share a physical table, which has one cache. An
            :class:`torch_dynemb.SSDStore` writes into ``<path>/<logical tables>/rank<r>of<n>``. An
            :class:`torch_dynemb.ExternalStore` gets the names of logical tables, each of one engine
            or embedding. Make the optimizer before the first lookup.
        score_from: name of the feature with the custom scores of training lookups, for an
            :class:`EmbeddingEngine`: a number for each id, or for each sample. Floats are rounded
            unless they are added to decayed sums. The table keeps them if the scores of its
            ``filter_hook`` have ``"custom"`` or a :class:`torch_dynemb.Custom`. None: scores are
            those of ``group.scores.set_batch``.
        fp16_enabled: int8 rows are returned as float16 instead of float32.
        no_reduce: True: the output is a :class:`NoReduceEmbedding`: rows that are not combined.
            Combiner and weights have no effect, and the feature has a lookup of its own.

    Raises:
        TypeError, ValueError: a wrong value, or a contradiction.

    Example:
        >>> EmbeddingOption(embedding_dim=8, shared_name="item", combiner="mean").children
        ['item']
    """

    embedding_dim: int = 16
    block_size: int = 10240
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    trainable: bool = True
    pg: dist.ProcessGroup | None = None
    max_partition_num: int = 65536
    shared_name: str = "embedding"
    children: list[str] = field(default_factory=list)
    coalesced: bool = False
    initializer: Initializer | None = None
    use_weight: bool = True
    combiner: str = "sum"
    combiner_kwargs: Mapping[str, Any] | None = None
    grad_reduce_by: Literal["worker", "id"] = "worker"
    filter_hook: FilterHook | None = None
    admit_hook: AdmitHook | None = None
    fp16_enabled: bool = False
    no_reduce: bool = False
    max_rows: int | None = None
    storage: Storage | None = None
    score_from: str | None = None

    def __post_init__(self) -> None:
        self.device = device_of("EmbeddingOption", self.device)
        check_storage_on("EmbeddingOption", self.storage, self.device)
        if isinstance(self.children, str) or not isinstance(self.children, Iterable):
            raise TypeError(
                f"EmbeddingOption: children is {described(self.children)}, expected a list of names"
            )
        self.children = list(self.children) or [self.shared_name]
        for name in ("trainable", "coalesced", "use_weight", "fp16_enabled", "no_reduce"):
            flag(f"EmbeddingOption: {name}", getattr(self, name))
        for name, value in [
            ("shared_name", self.shared_name),
            *((f"children[{i}]", child) for i, child in enumerate(self.children)),
        ]:
            text(f"EmbeddingOption: {name}", value)
        if self.combiner_kwargs is not None and not isinstance(self.combiner_kwargs, Mapping):
            raise TypeError(
                f"EmbeddingOption: combiner_kwargs is {described(self.combiner_kwargs)}, expected "
                "a dict or None"
            )
        if self.initializer is None:
            self.initializer = Constant(0.0)
        for name in ("embedding_dim", "block_size", "max_partition_num"):
            setattr(self, name, integer(f"EmbeddingOption: {name}", getattr(self, name), least=1))
        if self.max_rows is not None:
            most = integer("EmbeddingOption: max_rows", self.max_rows, least=1, most=MAX_ROWS)
            self.max_rows = most
        if self.dtype not in (*ROW_DTYPES, torch.int8):
            raise ValueError(
                f"EmbeddingOption: dtype is {self.dtype}, expected one of {list(ROW_DTYPES)} or "
                "torch.int8"
            )
        if self.fp16_enabled and self.dtype != torch.int8:
            raise ValueError(
                f"EmbeddingOption: fp16_enabled is True with dtype {self.dtype}, expected "
                "torch.int8: it is the output dtype of 8-bit rows"
            )
        if not isinstance(self.initializer, Initializer):
            raise TypeError(
                f"EmbeddingOption: initializer is {self.initializer!r}, expected one of "
                "torch_dynemb's, such as torch_dynemb.Uniform(-0.01, 0.01)"
            )
        self._check_children()
        self._check_combiner()
        check_grad_reduction("EmbeddingOption", self.grad_reduce_by)
        for name, kind in (("filter_hook", FilterHook), ("admit_hook", AdmitHook)):
            hook = getattr(self, name)
            if hook is not None and not isinstance(hook, kind):
                raise TypeError(
                    f"EmbeddingOption: {name} is {hook!r}, expected {kind.__name__}(name, params)"
                )
        self._check_score_from()

    def _check_score_from(self) -> None:
        if self.score_from is None:
            return
        text("EmbeddingOption: score_from", self.score_from)
        scores = () if self.filter_hook is None else self.filter_hook.make().scores
        if Policy(score=scores or None).custom is None:
            raise ValueError(
                f"EmbeddingOption: score_from is {self.score_from!r}, but filter_hook is "
                f"{self.filter_hook!r}, which keeps scores {scores}: give a filter with 'custom' "
                "or a torch_dynemb.Custom among its scores, or leave score_from out"
            )
        if self.reads_only or not self.trainable:
            raise ValueError(
                f"EmbeddingOption: score_from is {self.score_from!r}, but trainable is "
                f"{self.trainable} and admit_hook is {self.admit_hook!r}, so lookups change no "
                "scores: leave score_from out"
            )

    def _check_children(self) -> None:
        if not self.shared_name or not all(self.children):
            raise ValueError(
                f"EmbeddingOption: shared_name is {self.shared_name!r} and children are "
                f"{self.children}, expected names"
            )
        if len(set(self.children)) < len(self.children):
            raise ValueError(
                f"EmbeddingOption: children are {self.children}, expected every name once"
            )
        if len(self.children) > 1 and self.no_reduce:
            raise ValueError(
                f"EmbeddingOption: no_reduce is True with children {self.children}: give each an "
                "option of its own, to an EmbeddingEngine"
            )
        if len(self.children) > 1 and not self.coalesced:
            raise ValueError(
                f"EmbeddingOption: children are {self.children}, but coalesced is False: one table "
                "has one child"
            )

    def _check_combiner(self) -> None:
        if self.no_reduce:
            return
        known = combiner_names()
        if self.combiner not in known:
            raise ValueError(
                f"EmbeddingOption: combiner is {self.combiner!r}, expected one of {known}: 'tile' "
                "keeps the rows of a sample side by side, register_combiner adds others"
            )
        if self.combiner not in OWN_COMBINERS:
            return
        given = dict(self.combiner_kwargs or {})
        if self.combiner != "tile":
            if given:
                raise ValueError(
                    f"EmbeddingOption: combiner_kwargs is {given}, but combiner "
                    f"{self.combiner!r} takes none"
                )
            return
        length = given.pop("tile_len", None)
        if given or isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(
                f"EmbeddingOption: combiner_kwargs is {self.combiner_kwargs}, expected "
                "{'tile_len': n} with n of at least 1 for combiner 'tile'"
            )

    @property
    def reads_only(self) -> bool:
        """Whether training lookups insert nothing."""
        return self.admit_hook is not None and self.admit_hook.make() == READ_ONLY

    def described(self, feature: str) -> Described:
        """Describe the option for comparison between ranks, without sizes, groups and GPU numbers.

        Args:
            feature: name of the feature in errors.
        """
        entries = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in _NOT_ALIKE:
            del entries[name]
        assert isinstance(self.device, torch.device)
        entries["device"] = self.device.type
        return {Option(feature, name): comparable(value) for name, value in entries.items()}

    def coalesced_info(self) -> str:
        """Return, as JSON, the settings that tables of one physical table share."""
        assert isinstance(self.device, torch.device)
        info = {
            "dim": self.embedding_dim,
            "dtype": str(self.dtype),
            "device": str(self.device),
            "initializer": repr(self.initializer),
            "grad_reduce_by": self.grad_reduce_by,
            "filter_hook": repr(self.filter_hook),
        }
        if self.max_rows is not None:
            info["max_rows"] = str(self.max_rows)
        if self.storage is not None:
            info["storage"] = comparable(self.storage)
        return json.dumps(info)

    def runtime_info(self) -> str:
        """Return, as JSON, the settings that features of one lookup share."""
        info = {
            "combiner": self.combiner,
            "use_weight": self.use_weight,
            "trainable": self.trainable,
            "admit_hook": repr(self.admit_hook),
            "fp16_enabled": self.fp16_enabled,
        }
        if self.no_reduce:
            info["no_reduce"] = True
        if self.score_from is not None:
            info["brings_scores"] = True
        return json.dumps(info)
