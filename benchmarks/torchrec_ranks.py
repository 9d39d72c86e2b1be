"""What the ranks of torchrec_step.py do: training steps of static and dynamic tables, in turn."""

from __future__ import annotations

import gc
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from id_streams import ZipfNumbers, distinct_ids, spread
from timing import Timing, interleave_rounds
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

import torch_dynemb as td
from torch_dynemb.torchrec import DynamicEmbeddingBagCollectionSharder, TableOptions
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL

WORLD_SIZE = 2
LEARNING_RATE, EPS = 0.01, 1e-8
BATCHES = 4  # different batches, used in turn
FILL_BAGS = 16_384  # of a rank in a step that fills tables
SHARDINGS = ("row_wise", "table_wise")
STATIC = "static"
DYNAMIC = {"dynamic": False, "dynamic, dedup": True}  # name: use_index_dedup
OPTIMIZERS = {
    "RowWiseAdagrad": (EmbOptimType.EXACT_ROWWISE_ADAGRAD, td.RowWiseAdagrad),
    "SGD": (EmbOptimType.EXACT_SGD, td.SGD),
}


@dataclass(frozen=True)
class Sizes:
    """Of a measurement.

    Attributes:
        tables, rows, dim: tables, ids of each and their columns.
        batch: bags of a table on one rank.
        bags: ids of a bag; every size is measured.
        new_share: share of new ids in the steps in which new ids arrive.
        rounds, calls: rounds, and steps of each in a round.
    """

    tables: int
    rows: int
    dim: int
    batch: int
    bags: tuple[int, ...]
    new_share: float
    rounds: int
    calls: int

    @property
    def names(self) -> list[str]:
        """The tables, which are also the features."""
        return [f"table{t}" for t in range(self.tables)]


class Sent(NamedTuple):
    """What leaves the ranks in one step, all of them together.

    Attributes:
        ids: ids handed to the all-to-all, those that stay on their rank included.
        id_bytes: bytes of integers that leave a rank: ids and lengths of bags.
        row_bytes: bytes of floating-point numbers that leave a rank: outputs and their gradients.
    """

    ids: int
    id_bytes: int
    row_bytes: int


class Measured(NamedTuple):
    """A comparison: times, and what is sent, of "ours" and the "peer"."""

    timings: dict[str, Timing]
    sent: dict[str, Sent]


Step = Callable[[KeyedJaggedTensor], None]


def training_step(
    sizes: Sizes, sharding: str, optimizer: str, *, dedup: bool | None
) -> tuple[DistributedModelParallel, Step]:
    """A sharded collection and one training step of it.

    Args:
        sizes: of the tables.
        sharding: one of :data:`SHARDINGS`; table_wise puts the tables on the ranks in turn.
        optimizer: a key of :data:`OPTIMIZERS`.
        dedup: None: static tables, TorchRec's fused kernel; else dynamic ones, and whether every id
            of a batch is sent once.
    """
    stock, ours = OPTIMIZERS[optimizer]
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                embedding_dim=sizes.dim,
                num_embeddings=sizes.rows,
                feature_names=[name],
                weight_init_min=-0.01,
                weight_init_max=0.01,
            )
            for name in sizes.names
        ],
        device=torch.device("meta"),
    )
    sharder: Any
    if dedup is None:
        kernel = EmbeddingComputeKernel.FUSED.value
        fused = {"optimizer": stock, "learning_rate": LEARNING_RATE, "eps": EPS}
        sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    else:
        kernel = DYNAMIC_KERNEL
        more = {} if optimizer == "SGD" else {"eps": EPS}
        sharder = DynamicEmbeddingBagCollectionSharder(
            use_index_dedup=dedup,
            options={name: TableOptions() for name in sizes.names},
            optimizer=ours(lr=LEARNING_RATE, **more),
        )
    plan = construct_module_sharding_plan(
        module,
        {
            name: row_wise(compute_kernel=kernel)
            if sharding == "row_wise"
            else table_wise(rank=t % WORLD_SIZE, compute_kernel=kernel)
            for t, name in enumerate(sizes.names)
        },
        sharder=sharder,
        local_size=WORLD_SIZE,
        world_size=WORLD_SIZE,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )
    gradients: dict[int, Tensor] = {}

    def step(features: KeyedJaggedTensor) -> None:
        output = model(features).values()
        batch = output.shape[0]
        if batch not in gradients:
            gradients[batch] = torch.randn(output.shape)
        output.backward(gradients[batch])

    return model, step


def jagged(sizes: Sizes, ids: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
    """A batch as a data loader hands it over: nothing derived from it is cached yet."""
    return KeyedJaggedTensor(keys=sizes.names, values=ids, lengths=lengths)


def fill(sizes: Sizes, step: Step, rank: int) -> None:
    """Trains a dynamic table with every id of its streams, so that none is new."""
    mine = torch.arange(rank, sizes.rows, WORLD_SIZE)
    for begin in range(0, -(-sizes.rows // WORLD_SIZE), FILL_BAGS):
        ids = spread(mine[begin : begin + FILL_BAGS])
        bags = min(FILL_BAGS, -(-sizes.rows // WORLD_SIZE) - begin)
        lengths = torch.zeros(bags, dtype=torch.int64)
        lengths[: len(ids)] = 1
        step(jagged(sizes, ids.repeat(sizes.tables), lengths.repeat(sizes.tables)))


def numbers_of(sizes: Sizes, bag: int, rank: int) -> list[Tensor]:
    """Zipf numbers of batches, int64 [tables * batch * bag] each; which are frequent differs."""
    count = sizes.batch * bag
    batches = torch.empty(BATCHES, sizes.tables, count, dtype=torch.int64)
    for table in range(sizes.tables):
        stream = ZipfNumbers(sizes.rows, seed=table)
        for batch in range(BATCHES):
            batches[batch, table] = stream.draw(WORLD_SIZE * count)[rank::WORLD_SIZE]
    return list(batches.flatten(1))


class NewIds:
    """Batches in which some ids were never seen before, and other draws elsewhere.

    Args:
        first: the smallest number that has not been seen.
    """

    def __init__(self, first: int, share: float, rank: int) -> None:
        self._next = first + rank
        self._share = share
        self._generator = torch.Generator().manual_seed(rank)

    def of(self, ids: Tensor) -> Tensor:
        """``ids`` with new ones at random places."""
        count = max(1, int(self._share * len(ids)))
        places = torch.randperm(len(ids), generator=self._generator)[:count]
        changed = ids.clone()
        changed[places] = distinct_ids(self._next, WORLD_SIZE * count)[::WORLD_SIZE]
        self._next += WORLD_SIZE * count
        return changed


def time_steps(
    sizes: Sizes, steps: Mapping[str, Callable[[int], None]], rounds: int
) -> dict[str, Timing]:
    """Lets steps take turns; a round lasts until the last rank is done.

    Args:
        steps: name -> step of a number.
        rounds: rounds that count.
    """

    def timed(step: Callable[[int], None]) -> Callable[[int], float]:
        def round_of(number: int) -> float:
            dist.barrier()
            start = time.perf_counter()
            for call in range(number * sizes.calls, (number + 1) * sizes.calls):
                step(call)
            dist.barrier()
            return (time.perf_counter() - start) * 1e3 / sizes.calls

        return round_of

    return interleave_rounds(
        {name: timed(step) for name, step in steps.items()}, rounds=rounds, warmup=1
    )


def sent_by(step: Callable[[], None]) -> Sent:
    """Runs a step and counts what the ranks send."""
    ids = 0
    number_bytes = {True: 0, False: 0}  # of floating-point numbers, of integers

    def count(sent: Tensor | list[Tensor], copies: float) -> None:
        for tensor in sent if isinstance(sent, list) else [sent]:
            number_bytes[tensor.is_floating_point()] += int(tensor.nbytes * copies)

    def counting(name: str, place: int, argument: str, copies: float) -> Callable[..., Any]:
        function = getattr(dist, name)

        def call(*arguments: Any, **more: Any) -> Any:
            count(arguments[place] if len(arguments) > place else more[argument], copies)
            return function(*arguments, **more)

        return call

    others = WORLD_SIZE - 1
    sending = {  # place and name of what is sent, and how often it leaves the rank
        "all_to_all_single": (1, "input", others / WORLD_SIZE),
        "reduce_scatter": (1, "input_list", others / WORLD_SIZE),
        "reduce_scatter_tensor": (1, "input", others / WORLD_SIZE),
        "all_gather": (1, "tensor", others),
        "all_gather_into_tensor": (1, "input_tensor", others),
        "isend": (0, "tensor", 1),
    }
    forward = KJTAllToAll.forward

    def count_ids(self: KJTAllToAll, input: KeyedJaggedTensor) -> Any:
        nonlocal ids
        ids += input.values().numel()
        return forward(self, input)

    patched = {name: counting(name, *more) for name, more in sending.items()}
    with mock.patch.multiple(dist, **patched), mock.patch.object(KJTAllToAll, "forward", count_ids):
        step()
    total = torch.tensor([ids, number_bytes[False], number_bytes[True]])
    dist.all_reduce(total)
    return Sent(*total.tolist())


def compared(
    sizes: Sizes,
    steps: Mapping[str, Step],
    batches: Mapping[str, Callable[[int], Tensor]],
    bag: int,
) -> Measured:
    """Times "ours" against the "peer".

    Args:
        steps: by those names.
        batches: by those names, the ids of a step's number.
        bag: ids of a bag.
    """
    lengths = torch.full((sizes.tables * sizes.batch,), bag, dtype=torch.int64)

    def run(name: str, call: int) -> None:
        steps[name](jagged(sizes, batches[name](call), lengths))

    timings = time_steps(
        sizes,
        {name: lambda call, name=name: run(name, call) for name in steps},  # type: ignore[misc]
        sizes.rounds,
    )
    last = sizes.calls * (sizes.rounds + 1)
    sent = {name: sent_by(lambda name=name: run(name, last)) for name in steps}  # type: ignore[misc]
    return Measured(timings, sent)


def case_name(sharding: str, optimizer: str, bag: int, share: float) -> str:
    new = f", {100 * share:g} % new ids" if share else ""
    return f"{sharding} {optimizer} L={bag}{new}"


def measure(
    rank: int, sizes: Sizes, wanted: list[tuple[str, str, str, int, float]]
) -> Iterator[Measured]:
    """Compares dynamic tables with static ones.

    Args:
        wanted: (sharding, optimizer, key of :data:`DYNAMIC`, ids of a bag, share of new ids), those
            with the same tables together.
    """
    peer: tuple[Any, ...] | None = None
    ours: tuple[Any, ...] | None = None
    numbers: dict[int, list[Tensor]] = {}
    models: dict[str, DistributedModelParallel] = {}
    steps: dict[str, Step] = {}
    unseen = sizes.rows
    for sharding, optimizer, kind, bag, share in wanted:
        if peer != (sharding, optimizer):
            models.clear()
            steps.clear()
            gc.collect()
            models["peer"], steps["peer"] = training_step(sizes, sharding, optimizer, dedup=None)
        if ours != (sharding, optimizer, kind):
            models.pop("ours", None)
            steps.pop("ours", None)
            gc.collect()
            models["ours"], steps["ours"] = training_step(
                sizes, sharding, optimizer, dedup=DYNAMIC[kind]
            )
            fill(sizes, steps["ours"], rank)
            unseen = sizes.rows
        peer, ours = (sharding, optimizer), (sharding, optimizer, kind)
        numbers = numbers if bag in numbers else {bag: numbers_of(sizes, bag, rank)}
        static = numbers[bag]
        dynamic = [spread(batch) for batch in static]
        if share:
            arriving = NewIds(unseen, share, rank)
            last = sizes.calls * (sizes.rounds + 1)
            dynamic = [arriving.of(dynamic[call % BATCHES]) for call in range(last + 1)]
            unseen = arriving._next
        batches: dict[str, Callable[[int], Tensor]] = {
            "ours": lambda call, ids=dynamic: ids[call % len(ids)],  # type: ignore[misc]
            "peer": lambda call, ids=static: ids[call % len(ids)],  # type: ignore[misc]
        }
        yield compared(sizes, steps, batches, bag)


def work(
    pipe: Connection,
    rank: int,
    store: str,
    sizes: Sizes,
    wanted: list[tuple[str, str, str, int, float]],
) -> None:
    """The process of a rank: sends what it measured, or a traceback as text, or None at the end."""
    os.environ.update(
        LOCAL_WORLD_SIZE=str(WORLD_SIZE),
        LOCAL_RANK=str(rank),
        RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE
        )
        for measured in measure(rank, sizes, wanted):
            pipe.send(measured if rank == 0 else "")
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(None)
    except BaseException:  # the parent reports it
        pipe.send(traceback.format_exc())
