"""Shared part of both sharded collections: the way of a batch to the ranks of its ids and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_dynemb.distributed.failures import raise_together
from torch_dynemb.table.shards import IdSlots
from torch_dynemb.torchrec.planning.sharding_groups import sharding_group
from torch_dynemb.torchrec.sharding.agreed_sizes import (
    SizesUnderWay,
    as_torchrec_waits,
    leave_sizes,
)
from torch_dynemb.torchrec.sharding.batches import BatchCheck, copied, with_one_sample


class BatchPart:
    """Exchange of ids and outputs of a sharded collection.

    Attributes:
        module_kind: name of the unsharded class.
        configs_attribute: name of the attribute that has the configs of tables.
        shardings_attribute: name of the attribute that has TorchRec's shardings.
    """

    module_kind: ClassVar[str]
    configs_attribute: ClassVar[str]
    shardings_attribute: ClassVar[str]

    training: bool
    _lookups: list[torch.nn.Module]
    _input_dists: list[torch.nn.Module]
    _env: ShardingEnv
    _device: torch.device
    _has_uninitialized_input_dist: bool
    _check_batch: BatchCheck
    _output_order: list[str] | None = None  # of outputs; None: that of output_names
    _reorders: Callable[[], bool]  # returns whether features must be reordered
    _lacks_sample: Callable[[KeyedJaggedTensor], bool]  # whether TorchRec's outputs need a sample
    _without_samples: Callable[[Any], Any]  # removes the samples of outputs
    _reordered: Callable[[Any, list[str]], Any]  # returns outputs in another order

    def shardings(self) -> list[Any]:
        """Return TorchRec's shardings, one for each lookup."""
        shardings = getattr(self, self.shardings_attribute)
        return list(shardings.values() if isinstance(shardings, dict) else shardings)

    def _create_input_dist(self, *arguments: Any, **more: Any) -> None:
        """Create TorchRec's input dists; ranks exchange the sizes of all of them at once."""
        super()._create_input_dist(*arguments, **more)  # type: ignore[misc]
        if self._several_ranks is not None:
            for input_dist in self._input_dists:
                leave_sizes(input_dist)

    @property
    def _several_ranks(self) -> dist.ProcessGroup | None:
        """The ranks that exchange ids: those of a group in 2D parallelism; None: this rank only."""
        ranks = sharding_group(self._env)
        return None if ranks is None or ranks.size() == 1 else ranks

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Send ids to the ranks that own them, unless a rank refuses its batch.

        Then all ranks raise its error as the lookup of the batch begins, so a pipeline ends the
        batches before it.
        """
        ranks = self._several_ranks
        if ranks is None:
            return self._sent(ctx, self._with_sample(ctx, features))
        sent = KJTListSplitsAwaitable([None] * len(self._lookups), ctx)
        checked: KeyedJaggedTensor | None = None
        refused: Exception | None = None
        try:
            checked = self._with_sample(ctx, features)
        except Exception as error:
            refused = error
        if self._has_uninitialized_input_dist:
            raise_together(refused, ranks)  # all ranks make TorchRec's input dists, or none does
        if checked is not None:
            try:
                sent = self._sent(ctx, checked)
            except Exception as error:
                refused = error
        requests = sent.awaitables if refused is None else refused
        owned = [getattr(sharding, "ids", IdSlots()) for sharding in self.shardings()]
        tables = tuple(config.name for config in getattr(self, self.configs_attribute))
        under_way = SizesUnderWay(self.module_kind, tables, requests, owned, ranks, self._device)
        return as_torchrec_waits(under_way, sent)

    def _sent(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        """Call TorchRec's ``input_dist``, which sends nothing yet: see :func:`leave_sizes`."""
        return super().input_dist(ctx, features)  # type: ignore[misc]

    def _checked(self, ctx: Any, features: Any) -> KeyedJaggedTensor:
        """Check the batch of this rank."""
        first, trains = self._has_uninitialized_input_dist, torch.is_grad_enabled()
        return self._check_batch(features, first=first, trains=trains and self.training)

    def _with_sample(self, ctx: Any, features: Any) -> KeyedJaggedTensor:
        """Check the batch of this rank; add a sample if it has none."""
        checked = self._own(self._checked(ctx, features))
        if self._lacks_sample(checked):
            # TorchRec's outputs need a sample, and other ranks wait for the backward of this one
            checked = with_one_sample(checked)
            ctx.without_samples = True
        return checked

    def output_dist(self, ctx: Any, output: Any) -> Any:
        """Send outputs back to the ranks of their samples."""
        return self._finished(ctx, super().output_dist(ctx, output))  # type: ignore[misc]

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Look up the ids that arrived and send outputs back."""
        return self._finished(ctx, super().compute_and_output_dist(ctx, input))  # type: ignore[misc]

    def _finished(self, ctx: Any, awaitable: Any) -> Any:
        """Remove an added sample, and give outputs the order from before tables moved."""
        if getattr(ctx, "without_samples", False):
            awaitable.callbacks.append(self._without_samples)
        order, reordered = self._output_order, self._reordered
        if order is not None:
            awaitable.callbacks.append(lambda outputs: reordered(outputs, order))
        return awaitable

    def _own(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return features in memory that no other module of a pipeline frees.

        TorchRec's pipelines with ``free_features_storage_early`` free a batch as soon as one module
        has reordered its features, because reordering copies them. A module that needs no
        reordering would read freed memory.
        """
        if not getattr(self, "_free_features_storage_early", False):
            return features
        if self._has_uninitialized_input_dist or not self._reorders():
            return copied(features)
        return features


__all__ = ["BatchPart"]
