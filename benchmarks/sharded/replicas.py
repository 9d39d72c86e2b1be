"""Processes of replica_sync.py: two sharding groups of two ranks, which are synced."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common.id_streams import spread
from common.timing import Timing, elapsed_ms, interleave_rounds
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicDMPCollection,
    DynamicEmbeddingBagCollectionSharder,
    TableOptions,
)
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL

GROUPS, GROUP = 2, 2  # sharding groups, and ranks of each
RANKS = GROUPS * GROUP


@dataclass(frozen=True)
class Sizes:
    """Sizes of a measurement.

    Attributes:
        rows, dim: ids of the table, and its columns.
        rounds: timed rounds.
    """

    rows: int
    dim: int
    rounds: int


class Measured(NamedTuple):
    """Times of a sync, and bytes that a rank sends, of "ours" and the "peer"."""

    timings: dict[str, Timing]
    sent: dict[str, int]


class _Reduced:
    """TorchRec's sync of static tables over gloo, with the bytes of a ring all-reduce counted."""

    def __init__(self) -> None:
        self.bytes = 0
        self.group: dist.ProcessGroup | None = None

    def __call__(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=self.group)
            tensor /= GROUPS
            self.bytes += 2 * (GROUPS - 1) * tensor.nbytes // GROUPS


def model_of(sizes: Sizes, *, dynamic: bool, **more: Any) -> DynamicDMPCollection:
    """Return a table on two sharding groups.

    Args:
        sizes: of the table.
        dynamic: False: TorchRec's fused kernel.
        more: other arguments of the model.
    """
    config = EmbeddingBagConfig(
        name="ads", embedding_dim=sizes.dim, num_embeddings=sizes.rows, feature_names=["ad"]
    )
    module = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    sharder: Any = DynamicEmbeddingBagCollectionSharder(
        options={"ads": TableOptions()} if dynamic else None,
        optimizer=td.RowWiseAdagrad(lr=0.01),
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01},
    )
    kernel = DYNAMIC_KERNEL if dynamic else EmbeddingComputeKernel.FUSED.value
    plan = construct_module_sharding_plan(
        module,
        {"ads": row_wise(compute_kernel=kernel)},
        sharder=sharder,
        local_size=GROUP,
        world_size=GROUP,
        device_type="cpu",
    )
    return DynamicDMPCollection(
        module,
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        world_size=RANKS,
        sharding_group_size=GROUP,
        global_pg=dist.group.WORLD,
        sharders=[sharder],
        **more,
    )


def train(model: DynamicDMPCollection, ids: torch.Tensor) -> None:
    """Train each id once."""
    output = model(KeyedJaggedTensor(["ad"], ids, lengths=torch.ones_like(ids))).values()
    output.backward(torch.ones_like(output))
    model.fused_optimizer.step()


def measure(rank: int, sizes: Sizes, share: float, models: dict[str, Any]) -> Measured:
    """Time syncs after each group has trained a share of the ids.

    Args:
        share: of all ids, the ones that a group trains between two syncs.
        models: ``"ours"``, ``"peer"`` and ``"reduced"``.
    """
    count = max(GROUP, int(share * sizes.rows))
    sent: dict[str, int] = {}

    def timed(name: str) -> Callable[[int], float]:
        def round_of(number: int) -> float:
            draw = torch.Generator().manual_seed(RANKS * number + rank)
            numbers = torch.randint(sizes.rows, (count // GROUP,), generator=draw)
            train(models[name], spread(numbers) if name == "ours" else numbers)
            models["reduced"].bytes = 0

            def work() -> None:
                models[name].sync()
                dist.barrier()

            dist.barrier()
            elapsed = elapsed_ms(work)
            ours = models["ours"].last_sync
            sent[name] = ours.sent_bytes if name == "ours" else models["reduced"].bytes
            return elapsed

        return round_of

    candidates = {name: timed(name) for name in ("ours", "peer")}
    timings = interleave_rounds(candidates, rounds=sizes.rounds, warmup=1)
    return Measured(timings, sent)


def work(pipe: Connection, rank: int, store: str, sizes: Sizes, shares: list[float]) -> None:
    """Run the process of a rank: it sends measurements, or a traceback as text, then None."""
    os.environ.update(
        LOCAL_WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(RANKS)
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
        reduced = _Reduced()
        models: dict[str, Any] = {
            "reduced": reduced,
            "ours": model_of(sizes, dynamic=True),
            "peer": model_of(sizes, dynamic=False, custom_all_reduce=reduced),
        }
        reduced.group = models["peer"].replica_group
        mine = torch.arange(models["ours"].sharding_group.rank(), sizes.rows, GROUP)
        for some in mine.split(1 << 16):
            train(models["ours"], spread(some))
        models["ours"].sync()
        for share in shares:
            measured = measure(rank, sizes, share, models)
            pipe.send(measured if rank == 0 else "")
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(None)
    except BaseException:  # the parent reports it
        pipe.send(traceback.format_exc())
