"""Arguments for every op of ``torch.ops.dynemb``: small groups, fresh tensors on every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from group_calls import Call, call_of
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops.columns import Pooling, RowClock
from torch_dynemb.ops.pending import PendingGradients
from torch_dynemb.ops.update import APPLIES_DELAYED
from torch_dynemb.optim import OptimizerConfig

OpArguments = tuple[Any, ...]
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "sgd": td.SGD(lr=0.1),
    "adagrad": td.Adagrad(lr=0.1, initial_accumulator_value=0.5),
    "rowwise_adagrad": td.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.5),
    "adam": td.Adam(lr=0.1),
    "adamw_tf": td.AdamWTF(lr=0.1),
    "momentum_sgd": td.MomentumSGD(lr=0.1, nesterov=True),
    "amsgrad": td.AMSGrad(lr=0.1),
    "smart_decay_adam": td.SmartDecayAdam(lr=0.1),
    "partial_rowwise_adam": td.PartialRowWiseAdam(lr=0.1, row_steps=True),
    "lamb": td.LAMB(lr=0.1, weight_decay=0.1),
    "partial_rowwise_lamb": td.PartialRowWiseLAMB(lr=0.1),
    "lars_sgd": td.LARSSGD(lr=0.1),
    "ftrl": td.Ftrl(lr=0.1, l1=0.1),
    "group_ftrl": td.GroupFtrl(lr=0.1, group_l1=0.1),
}
# optimizers with other state or rows than the plain ones
STORED: dict[str, tuple[OptimizerConfig, torch.dtype]] = {
    "bfloat16": (td.Adam(lr=0.1, state_dtype=torch.bfloat16, row_steps=True), torch.bfloat16),
    "8 bits": (td.Adam(lr=0.1, state_dtype=torch.uint8), torch.float16),
}

MANY_SCORES = td.Policy(score=("timestamp", "frequency"), ttl=10)
# of a group that has ten ids in every table, when pooled_call brings new ones
POLICIES = {
    "frequency": td.Policy(score="frequency"),
    "many scores": MANY_SCORES,
    "evict": td.Policy(score="frequency", capacity=10),
    "default": td.Policy(capacity=11, on_full="default"),
    "beyond capacity": td.Policy(capacity=11, on_full="grow"),
    "counted": td.Policy(admission=td.AdmitFrequent(2)),
    "sketch": td.Policy(score="step", admission=td.AdmitFrequentSketch(2, memory=4096)),
    "chance": td.Policy(admission=td.AdmitByChance(0.5)),
    "admit none": td.Policy(score="step", admission=td.AdmitNone()),
}

# They manage a GPU's memory and have no CPU kernel; tests of CUDA call them.
GPU_MEMORY_OPS = {
    "available_cuda_memory",
    "bind_group",
    "end_step",
    "raise_device_errors",
    "release_group",
    "reserve_cuda",
}


def all_op_names() -> list[str]:
    """Names of all ops of the library, without namespace."""
    prefix = "dynemb::"
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def op_names() -> list[str]:
    """Names of the ops that the CPU has, too."""
    return [name for name in all_op_names() if name not in GPU_MEMORY_OPS]


def make_group(
    *, optimizer: str = "adam", score: Any = "step", split: bool = False
) -> td.TableGroup:
    """Two dims, three tables; ids 0 to 9 are there, some trained, some erased."""
    policy = score if isinstance(score, td.Policy) else td.Policy(score=score)
    config, dtype = STORED.get(optimizer) or (OPTIMIZERS[optimizer], torch.float32)
    tables = [
        td.TableConfig("a", 4, policy=policy, dtype=dtype),
        td.TableConfig("b", 3, padding_idx=0, policy=policy, dtype=dtype),
        td.TableConfig("c", 4, initializer=td.Uniform(), policy=policy, dtype=dtype),
    ]
    group = td.TableGroup(tables, optimizer=config, max_rows=64, seed=2, split=split)
    group.index.clock[1] = 1000  # not the machine's time
    for table in range(3):
        group.index.clock[0] += 1
        group.insert(table, torch.arange(10))
    call = call_of(group, [(0, [[1, 2]]), (1, [[1]]), (2, [[3]])])
    handles = group.find(call.ids, call.offsets, call.tables).handles
    output = ops.embedding_bag(
        group.rows,
        call.ids,
        handles,
        call.offsets,
        None,
        torch.zeros(1, requires_grad=True),
        feature_tables=call.tables,
        feature_dims=call.dims,
        pooling=Pooling.SUM,
        optimizer=group.config.optimizer_code,
    )
    output.sum().backward()
    group.erase(0, torch.arange(3))
    return group


def pooled_call(group: td.TableGroup, batch: int = 2) -> Call:
    """Known, new, repeated and padding ids, in bags of mixed length."""
    bags = [[[1, 2, 70], [], [5]], [[0, 3, 3, 71], [72], [4]], [[6], [73, 7, 7], []]]
    return call_of(group, [(t, bags[t][:batch]) for t in range(3)])


def flat_call(group: td.TableGroup) -> Call:
    """Features of one dim."""
    return call_of(group, [(0, [[1, 2, 70]]), (2, [[5, 6, 6]])])


def found(group: td.TableGroup, call: Call) -> Tensor:
    return group.find(call.ids, call.offsets, call.tables).handles


def step_arguments(now: int | None) -> OpArguments:
    group = make_group()
    return group.index.buckets, group.index.tables, group.rows.row_clock, group.index.clock, now


def index_arguments(
    score: Any, *, insert: bool, empty: bool = False, masked: bool = False
) -> OpArguments:
    group = make_group(score=score)
    call = pooled_call(group, batch=0 if empty else 2)
    index = (
        group.index.buckets,
        group.index.scores,
        group.index.tables,
        group.index.slabs,
        group.index.free_rows,
    )
    if not insert:
        return (*index, group.index.meta, call.ids, call.offsets, call.tables)
    policies = list(call.tables) if group.config.layout.rows else []
    admit = call.ids % 3 != 0 if masked else None
    return (
        *index,
        group.index.sketch,
        group.index.evicted,
        group.index.meta,
        group.index.policy,
        group.index.clock,
        call.ids,
        call.offsets,
        admit,
        call.tables,
        policies,
    )


def find_arguments(*, empty: bool) -> OpArguments:
    group = make_group()
    call = pooled_call(group, batch=0 if empty else 2)
    return (
        group.index.buckets,
        group.index.tables,
        group.index.meta,
        call.ids,
        call.offsets,
        call.tables,
    )


def grow_arguments(score: Any, ids: int) -> OpArguments:
    group = make_group(score=score)
    return group.index.buckets, group.index.scores, group.index.tables, group.index.meta, 0, ids


def shrink_arguments(score: Any, ids: int) -> OpArguments:
    group = make_group(score=score)
    group.insert(0, torch.arange(50))
    group.erase(0, torch.arange(0, 50, 2))
    return group.index.buckets, group.index.scores, group.index.tables, group.index.meta, 0, ids


def handle_arguments() -> OpArguments:
    group = make_group()
    call = call_of(group, [(0, [[4, 5, 70]]), (1, [[0, 3, 4]])])
    handles = torch.arange(6) << 28 | 7
    return (
        group.index.buckets,
        group.index.tables,
        group.index.meta,
        call.ids,
        call.offsets,
        call.tables,
        handles,
    )


def export_arguments(score: Any) -> OpArguments:
    group = make_group(score=score)
    return group.index.buckets, group.index.scores, group.index.tables, group.index.meta, 0, 0, 1000


def counts_arguments() -> OpArguments:
    group = make_group()
    return group.index.buckets, group.index.tables, group.rows.row_clock


def score_arguments(*, given: bool) -> OpArguments:
    group = make_group()
    call = call_of(group, [(0, [[1, 5, 70]]), (1, [[0, 3, 4]])])
    index = (group.index.buckets, group.index.scores, group.index.tables, group.index.meta)
    values = (torch.arange(100, 106),) if given else ()
    return (*index, call.ids, call.offsets, call.tables, *values, 0)


def per_sample_weights(call: Call, kind: str) -> Tensor | None:
    if kind == "plain":
        return None
    values = torch.linspace(0.5, 1.5, len(call.ids))
    return values.requires_grad_() if kind == "learned" else values


def bag_arguments(
    kind: str,
    pooling: Pooling,
    *,
    anchor: bool,
    batch: int = 2,
    optimizer: int = 3,
    stored: str = "adam",
    split: bool = False,
) -> OpArguments:
    group = make_group(optimizer=stored, split=split)
    call = pooled_call(group, batch)
    return (
        *group.rows,
        call.ids,
        found(group, call),
        call.offsets,
        per_sample_weights(call, kind),
        torch.zeros(1, requires_grad=anchor),
        call.tables,
        call.dims,
        int(pooling),
        optimizer,
    )


def sequence_arguments(*, anchor: bool) -> OpArguments:
    group = make_group()
    call = flat_call(group)
    return (
        *group.rows,
        call.ids,
        found(group, call),
        call.offsets,
        torch.zeros(1, requires_grad=anchor),
        call.tables,
        4,
        3,
    )


def read_only_rows(group: td.TableGroup) -> OpArguments:
    return group.rows.weights, group.rows.generations, group.index.meta, group.rows.init_data


def bag_inference_arguments(kind: str, pooling: Pooling, *, stored: str = "adam") -> OpArguments:
    group = make_group(optimizer=stored)
    call = pooled_call(group)
    weights = per_sample_weights(call, kind)
    shared = (call.ids, found(group, call), call.offsets, weights, call.tables, call.dims)
    return (*read_only_rows(group), *shared, int(pooling))


def sequence_inference_arguments() -> OpArguments:
    group = make_group()
    call = flat_call(group)
    return (*read_only_rows(group), call.ids, found(group, call), call.offsets, call.tables, 4)


def gradient_arguments(group: td.TableGroup, kind: str, pooling: Pooling) -> OpArguments:
    """From the rows that a gradient needs to its pooling."""
    call = pooled_call(group)
    handles = group.find_or_insert(call.ids, call.offsets, call.tables)
    gradient = torch.linspace(-1.0, 1.0, 2 * sum(call.dims)).reshape(2, -1)
    shared = (call.ids, handles, call.offsets, per_sample_weights(call, kind))
    return gradient, *shared, call.tables, call.dims, int(pooling)


def reduce_arguments(kind: str, pooling: Pooling) -> OpArguments:
    group = make_group()
    return (*read_only_rows(group), *gradient_arguments(group, kind, pooling))


def backward_arguments(optimizer: str, kind: str, pooling: Pooling) -> OpArguments:
    group = make_group(optimizer=optimizer)
    gradient, ids, handles, offsets, weights, *features = gradient_arguments(group, kind, pooling)
    updates = torch.tensor([1])
    return (*group.rows.updated, gradient, ids, handles, offsets, weights, updates, *features)


def update_arguments(optimizer: str) -> OpArguments:
    group = make_group(optimizer=optimizer)
    arguments = gradient_arguments(group, "plain", Pooling.SUM)
    reduced = torch.ops.dynemb.reduce_grad(*read_only_rows(group), *arguments)
    return (*group.rows.updated, *reduced, torch.tensor([1]), [0, 1, 2])


def pending_arguments(kind: str, pooling: Pooling) -> OpArguments:
    group = make_group(split=True)
    gradient, ids, handles, offsets, weights, *features = gradient_arguments(group, kind, pooling)
    updates = group.rows.row_clock[-4 + RowClock.UPDATES].reshape(1).clone()
    lookup = (gradient, ids, handles, offsets, weights, updates, *features)
    pending = PendingGradients.of(group.rows.pending)
    return (*pending, group.rows.row_clock, *read_only_rows(group), *lookup)


def merge_arguments() -> OpArguments:
    """Two lookups; between them the row of id 6 of table 0 gets another owner."""
    group = make_group(split=True)
    for known, new in (([5, 6, 7], []), ([7, 5], [80])):
        call = call_of(group, [(0, [[*known, *new]])])
        handles = group.find_or_insert(call.ids, call.offsets, call.tables)
        rows = torch.ops.dynemb.embedding(
            *group.rows,
            call.ids,
            handles,
            call.offsets,
            torch.zeros(1, requires_grad=True),
            call.tables,
            4,
            group.config.optimizer_code,
        )[0]
        rows.sum().backward()
        group.erase(0, torch.tensor([6]))
    return (*PendingGradients.of(group.rows.pending), group.rows.row_clock)


def materialize_arguments(optimizer: str) -> OpArguments:
    group = make_group(optimizer=optimizer)
    index = (
        group.index.buckets,
        group.index.tables,
        group.rows.hyper,
        group.index.meta,
        group.rows.init_data,
    )
    return (group.rows.weights, group.rows.generations, group.rows.state, *index)


def pooled_kinds() -> Iterator[tuple[str, Pooling]]:
    for kind in ("plain", "weighted"):
        for pooling in (Pooling.SUM, Pooling.MEAN):
            yield kind, pooling


def no_positions(bags: int) -> tuple[Tensor, Tensor]:
    """Positions and offsets of empty bags."""
    return torch.empty(0, dtype=torch.int64), torch.zeros(bags + 1, dtype=torch.int64)


def some_rows(rows: int, dim: int) -> Tensor:
    return torch.linspace(-1, 1, rows * dim).reshape(rows, dim)


def bag_weights(kind: str, count: int) -> Tensor | None:
    if kind == "plain":
        return None
    return torch.linspace(-0.5, 1.5, count).requires_grad_(kind == "learned")


BAGS = (torch.tensor([2, 0, 2, 1, 1, 2, 0]), torch.tensor([0, 2, 2, 5, 6, 6, 7]))  # 2 features


def plain_bag_arguments(kind: str, pooling: Pooling) -> OpArguments:
    positions, offsets = (tensor.clone() for tensor in BAGS)
    rows = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_(kind == "learned")
    return rows, positions, offsets, 2, bag_weights(kind, 7), int(pooling)


def plain_bag_grad_arguments(kind: str, pooling: Pooling) -> OpArguments:
    positions, offsets = (tensor.clone() for tensor in BAGS)
    grad = torch.linspace(-1, 1, 24).reshape(3, 8)
    return grad, positions, offsets, 2, 4, bag_weights(kind, 7), int(pooling)


def plain_weight_grad_arguments(pooling: Pooling) -> OpArguments:
    positions, offsets = (tensor.clone() for tensor in BAGS)
    bags = (positions, offsets, bag_weights("weighted", 7), 2)
    return some_rows(3, 8), some_rows(3, 4), *bags, int(pooling)


def tile_arguments(kind: str) -> OpArguments:
    rows, positions, offsets, _, weights, _ = plain_bag_arguments(kind, Pooling.SUM)
    return rows, positions, offsets, weights, [2, 3], [0, 1]


def tile_grad_arguments(kind: str) -> OpArguments:
    _, positions, offsets, weights, lens, left = tile_arguments(kind)
    grads = [torch.linspace(-1, 1, 3 * n * 4).reshape(3, n * 4) for n in lens]
    return grads, positions, offsets, weights, 4, lens, left


def tile_weight_grad_arguments() -> OpArguments:
    rows, positions, offsets, _, lens, left = tile_arguments("plain")
    grads = tile_grad_arguments("plain")[0]
    return grads, rows, positions, offsets, lens, left


def ragged_arguments(*, learned: bool = False) -> OpArguments:
    """Three features of different dtypes; the first and the last have weights.

    opcheck adds up results in the dtype of the first, which must therefore have a gradient.
    """
    values = [
        torch.linspace(0, 1, 6).requires_grad_() if learned else torch.arange(6) - 2**40,
        torch.tensor([True, False, True]),
        torch.linspace(-1, 1, 5).requires_grad_(learned),
    ]
    offsets = [
        torch.tensor([0, 3, 3, 6]),
        torch.tensor([0, 2, 3]),
        torch.tensor([0, 0, 4, 5]),
    ]
    weights = [torch.linspace(0, 1, 6).requires_grad_(learned), torch.linspace(1, 2, 5)]
    return values, offsets, weights, [0, 2]


def no_rows() -> OpArguments:
    return [torch.empty(0), torch.arange(2)], [torch.tensor([0]), torch.tensor([0, 0, 2])]


def nested_cut_arguments(*, learned: bool) -> OpArguments:
    values = [torch.arange(5), torch.linspace(0, 1, 4).half(), torch.linspace(-1, 1, 3)]
    if learned:
        values[0] = torch.linspace(0, 1, 5)
    outer = [torch.tensor([0, 3, 3, 4]), torch.tensor([0, 2]), torch.tensor([0, 1, 3])]
    inner = [torch.tensor([0, 2, 2, 3, 5]), torch.tensor([0, 1, 4]), torch.tensor([0, 1, 1, 3])]
    values[2].requires_grad_(learned)
    weights = [torch.linspace(0, 1, 5).requires_grad_(learned)]
    return values, outer, inner, weights, [0], [2, 1, 3], [1, 0, 0], [1, 0, 1]


def topk_arguments(*, learned: bool) -> OpArguments:
    values, offsets, weights, weighted = ragged_arguments(learned=learned)
    indices = [
        torch.tensor([[2, 0, -1], [0, 1, 2], [1, 1, 5]]),
        torch.tensor([[1], [0]]),
        torch.tensor([[0, 0], [3, 1], [-7, 0]]),
    ]
    return values, offsets, indices, weights, weighted


def nested_arguments(*, learned: bool = False) -> OpArguments:
    """Depths 1, 2 and 3."""
    values = [
        torch.linspace(-1, 1, 3).requires_grad_(learned),
        torch.arange(5).to(torch.int16),
        torch.arange(4).double().requires_grad_(learned),
    ]
    offsets = [
        torch.tensor([0, 2, 2, 3]),
        torch.tensor([0, 3, 4]),
        torch.tensor([0, 2, 2, 4, 5]),
        torch.tensor([0, 1, 3]),
        torch.tensor([0, 2, 2, 3]),
        torch.tensor([0, 1, 3, 4]),
    ]
    return values, offsets, [1, 2, 3], [2, 3, 2, 2, 2, 3]


def dense_arguments(*, learned: bool = False) -> list[Tensor]:
    numbers = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 2]])
    return [
        numbers.float() if learned else numbers,
        torch.tensor([[[1.0, -0.0], [0.0, 2.0]], [[0.0, 0.0], [3.0, 1.0]]]).requires_grad_(learned),
        torch.zeros(2, 0, 3).to(torch.uint8),
    ]


def cross_arguments(*, weighted: bool) -> OpArguments:
    x, y = torch.tensor([5, 5, 6, 7, 5]), torch.tensor([1, 1, 2, -3])
    weights = [torch.linspace(0, 1, 5)] if weighted else []
    y_weights = [torch.linspace(-1, 1, 4)] if weighted else []
    return (
        [x, torch.arange(2)],
        [torch.tensor([0, 3, 4, 5]), torch.tensor([0, 2])],
        [y, torch.tensor([9])],
        [torch.tensor([0, 2, 2, 4]), torch.tensor([0, 1])],
        weights,
        [0] if weighted else [],
        y_weights,
        [0] if weighted else [],
    )


def string_arguments(*, empty: bool = False) -> OpArguments:
    """Strings of every length from 0 to 140, at every alignment; others of signed bytes."""
    if empty:
        return [torch.empty(0).byte(), torch.empty(0).byte()], [torch.tensor([0])] * 2
    lengths = torch.arange(141)
    text = torch.arange(int(lengths.sum())) * 37 % 251
    values = [text.byte(), torch.tensor([-1, 5, -128], dtype=torch.int8)]
    return values, [torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]), torch.tensor([0, 2, 3])]


Case = Callable[[], OpArguments]

UNIQUE_CASES: dict[str, Case] = {
    "": lambda: (torch.tensor([5, -1, 5, 5, 7]), torch.tensor([0, 3, 3, 5])),
    "many": lambda: (torch.arange(700) ** 2 % 97 - 40, torch.tensor([0, 300, 300, 310, 700])),
    "empty": lambda: (torch.tensor([], dtype=torch.int64), torch.tensor([0, 0])),
}


def partition_arguments(case: str, parts: int, slots: int) -> OpArguments:
    return *UNIQUE_CASES[case](), parts, slots


CASES: dict[str, dict[str, Case]] = {
    "reserve": {
        "float32": lambda: ([3, 4], 0, False),
        "int32": lambda: ([5], 1, False),
        "int64": lambda: ([0, 8], 2, True),
        "bfloat16": lambda: ([3, 4], 3, False),
        "uint8": lambda: ([3, 4], 5, False),
    },
    "available_memory": {"": lambda: ()},
    "advance_step_": {
        "": lambda: step_arguments(None),
        "time": lambda: step_arguments(1001),
    },
    "simd_level": {"": lambda: ()},
    "set_simd_level": {"baseline": lambda: (0,)},
    "mix_ids": {"": lambda: (torch.tensor([5, -1, 2**63 - 1]),)},
    "unmix_ids": {"": lambda: (torch.tensor([5, -1, 2**60]), 8, 3)},
    "unique_ids": UNIQUE_CASES,
    "unique_ids_padded": UNIQUE_CASES,
    "id_owners": {"": lambda: (torch.tensor([5, -1, 2**63 - 1, -(2**63)]), 3, 65536)},
    "ids_partition": {
        name: partial(partition_arguments, case, parts, slots)
        for name, case, parts, slots in (
            ("", "", 3, 65536),
            ("many", "many", 5, 7),
            ("empty", "empty", 2, 2),
        )
    },
    "ids_concat": {
        "": lambda: (
            [torch.arange(6).reshape(2, 3), torch.arange(4).int(), torch.tensor([2**62])],
            [torch.tensor([0, 3]), torch.tensor([0, 0, 1]).int()],
            [1, 2],
            2,
        ),
        "sequences": lambda: ([torch.arange(300), torch.tensor(4), torch.arange(0)], [], [], 1),
        "one feature": lambda: ([torch.arange(5)], [torch.tensor([0, 2, 2])], [0], 3),
        "no bags": lambda: ([torch.empty(0, 3).long()], [torch.tensor([0])], [0], 0),
    },
    "ids_encode": {
        "": lambda: ([torch.tensor([5, -1]), torch.tensor([[5], [2**62]])], [0, -7]),
        "one table": lambda: ([torch.arange(300)], [4]),
    },
    "bucketize": {
        "": lambda: (
            [
                torch.tensor([0.5, 0.75, 9.0]).double(),
                torch.tensor([[1.0], [2.0]]).double(),
            ],
            [torch.tensor([0.5, 0.5, 1.0]).double(), torch.empty(0).double()],
        ),
        "other dtypes": lambda: (
            [torch.tensor([0.5, float("inf")]), torch.arange(-9, 9).int(), torch.arange(400) % 50],
            [torch.tensor([float("-inf"), 1.0]), torch.arange(-5, 5).int(), torch.arange(5, 40)],
        ),
    },
    "multi_hash": {
        "": lambda: (
            [torch.tensor([5, -1, 2**63 - 1]), torch.tensor([[7]]), torch.tensor([3])],
            [1, 3, -5],
            [29, 2**63 - 1, 41],
            [10, 2**62, 7],
            [2, 0, 1],
        )
    },
    "farmhash": {"": lambda: string_arguments(), "empty": lambda: string_arguments(empty=True)},
    "murmurhash": {
        "": lambda: (*string_arguments(), 0),
        "seed": lambda: (*string_arguments(), 2**32 - 1),
    },
    "murmurhash64a": {
        "": lambda: (*string_arguments(), 0),
        "seed": lambda: (*string_arguments(), -(2**63)),
    },
    "mod": {
        "": lambda: (
            [torch.tensor([5, -1, 2**63 - 1]), torch.tensor([[-(2**63)], [9]])],
            [7, 2**40],
        ),
        "one feature": lambda: ([torch.arange(-300, 300)], [10]),
        "empty": lambda: (
            [torch.empty(0, 2).long(), torch.tensor([3]), torch.empty(0).long()],
            [1, 2, 3],
        ),
    },
    "pool_rows": {
        **{
            f"{kind} {pooling.name}": partial(plain_bag_arguments, kind, pooling)
            for kind in ("plain", "weighted", "learned")
            for pooling in (Pooling.SUM, Pooling.MEAN)
        },
        "many rows": lambda: (
            some_rows(3, 40),
            torch.arange(300) % 3,
            torch.tensor([0, 150, 300]),
            2,
            torch.linspace(-1, 1, 300),
            1,
        ),
        "odd": lambda: (
            some_rows(3, 5),
            torch.tensor([1, 2]),
            torch.tensor([0, 1, 2]),
            1,
            None,
            0,
        ),
        "empty": lambda: (
            some_rows(3, 4),
            torch.tensor([]).long(),
            torch.tensor([0]),
            2,
            None,
            1,
        ),
    },
    "pool_rows_grad": {
        **{
            f"{kind} {pooling.name}": partial(plain_bag_grad_arguments, kind, pooling)
            for kind, pooling in pooled_kinds()
        },
        "no rows": lambda: (some_rows(2, 4), *no_positions(2), 1, 0, None, 0),
        "many positions": lambda: (
            some_rows(2, 40),
            torch.arange(300) % 2,
            torch.tensor([0, 150, 300]),
            1,
            3,
            None,
            0,
        ),
        "empty": lambda: (
            some_rows(0, 8),
            torch.tensor([]).long(),
            torch.tensor([0]),
            2,
            3,
            None,
            1,
        ),
    },
    "pool_rows_weight_grad": {
        pooling.name: partial(plain_weight_grad_arguments, pooling)
        for pooling in (Pooling.SUM, Pooling.MEAN)
    },
    "ragged_tile": {
        "weighted": partial(tile_arguments, "weighted"),
        "plain": partial(tile_arguments, "plain"),
        "learned": partial(tile_arguments, "learned"),
        "empty": lambda: (
            some_rows(3, 4),
            torch.tensor([]).long(),
            torch.tensor([0]),
            None,
            [1, 2],
            [0, 1],
        ),
    },
    "ragged_tile_grad": {
        **{kind: partial(tile_grad_arguments, kind) for kind in ("weighted", "plain")},
        "no rows": lambda: ([some_rows(2, 4)], *no_positions(2), None, 0, [2], [0]),
    },
    "ragged_tile_weight_grad": {"": tile_weight_grad_arguments},
    "ragged_cutoff_2d": {
        "weighted": lambda: (*ragged_arguments(), [2, 1, 100], [1, 0, 0]),
        "learned": lambda: (*ragged_arguments(learned=True), [2, 1, 100], [1, 0, 0]),
        "empty": lambda: (*no_rows(), [], [], [0, 3], [0, 1]),
    },
    "ragged_cutoff_3d": {
        "weighted": partial(nested_cut_arguments, learned=False),
        "learned": partial(nested_cut_arguments, learned=True),
        "empty": lambda: (
            [torch.empty(0), torch.empty(0)],
            [torch.tensor([0]), torch.tensor([0, 0, 0])],
            [torch.tensor([0]), torch.tensor([0])],
            [],
            [],
            [2, 3],
            [0, 1],
            [1, 0],
        ),
    },
    "ragged_topk_index_cutoff": {
        "weighted": partial(topk_arguments, learned=False),
        "learned": partial(topk_arguments, learned=True),
        "no positions": lambda: (
            [torch.arange(3)],
            [torch.tensor([0, 1, 3])],
            [torch.empty(2, 0).long()],
            [],
            [],
        ),
    },
    "ragged_to_dense": {
        "": lambda: (*nested_arguments(), 7.0, 7),
        "learned": lambda: (*nested_arguments(learned=True), -0.5, 0),
        "one feature": lambda: (
            [torch.arange(4).bfloat16()],
            [torch.tensor([0, 0, 4])],
            [1],
            [5],
            float("inf"),
            0,
        ),
    },
    "ragged_indices": {"": nested_arguments},
    "dense_to_ragged": {
        "": lambda: (dense_arguments(), True, 0.0, 0),
        "learned": lambda: (dense_arguments(learned=True), True, 1.0, 1),
        "all": lambda: (dense_arguments(), False, 0.0, 0),
        "one feature": lambda: ([torch.tensor([[1.0, -0.0], [0.0, 0.0]]).half()], True, 0.0, 0),
    },
    "feature_cross_ragged": {
        "weighted": partial(cross_arguments, weighted=True),
        "plain": partial(cross_arguments, weighted=False),
        "long rows": lambda: (
            [torch.arange(60) % 23],
            [torch.tensor([0, 57, 60])],
            [torch.arange(50) % 7],
            [torch.tensor([0, 0, 50])],
            [],
            [],
            [torch.linspace(0, 1, 50)],
            [0],
        ),
    },
    "find": {
        "": partial(find_arguments, empty=False),
        "empty": partial(find_arguments, empty=True),
    },
    "find_or_insert_": {
        "scored and masked": partial(index_arguments, POLICIES["sketch"], insert=True, masked=True),
        "step": partial(index_arguments, "step", insert=True),
        "plain": partial(index_arguments, "none", insert=True),
        "empty": partial(index_arguments, "step", insert=True, empty=True),
        **{
            name: partial(index_arguments, policy, insert=True) for name, policy in POLICIES.items()
        },
    },
    "erase_": {
        "scored": partial(index_arguments, "step", insert=False),
        "plain": partial(index_arguments, "none", insert=False),
        "many scores": partial(index_arguments, MANY_SCORES, insert=False),
        "empty": partial(index_arguments, "none", insert=False, empty=True),
    },
    "grow_": {
        "scored": partial(grow_arguments, "step", 60),
        "plain": partial(grow_arguments, "none", 60),
        "many scores": partial(grow_arguments, MANY_SCORES, 60),
        "enough": partial(grow_arguments, "none", 5),
    },
    "shrink_": {
        "scored": partial(shrink_arguments, "step", 0),
        "many scores": partial(shrink_arguments, MANY_SCORES, 5),
        "enough": partial(shrink_arguments, "none", 500),
    },
    "set_handles_": {"": handle_arguments},
    "release_": {"": lambda: (torch.ones(6, 3), 2, 6)},
    "export_batch": {
        "scored": partial(export_arguments, "step"),
        "plain": partial(export_arguments, "none"),
        "many scores": partial(export_arguments, MANY_SCORES),
    },
    "reported_counts": {"": counts_arguments},
    "get_scores": {"": partial(score_arguments, given=False)},
    "set_scores_": {"": partial(score_arguments, given=True)},
    "embedding_bag": {
        **{
            f"{kind} {pooling.name}": partial(bag_arguments, kind, pooling, anchor=True)
            for kind, pooling in (*pooled_kinds(), ("learned", Pooling.MEAN))
        },
        "no gradient": partial(bag_arguments, "plain", Pooling.SUM, anchor=False),
        "empty": partial(bag_arguments, "plain", Pooling.SUM, anchor=True, batch=0),
        "weights only": partial(bag_arguments, "learned", Pooling.SUM, anchor=True, optimizer=-1),
        "delayed gradients": partial(
            bag_arguments, "plain", Pooling.SUM, anchor=True, optimizer=APPLIES_DELAYED + 3
        ),
        **{
            name: partial(bag_arguments, "plain", Pooling.SUM, anchor=True, stored=name)
            for name in STORED
        },
        "split": partial(bag_arguments, "weighted", Pooling.MEAN, anchor=True, split=True),
    },
    "embedding": {
        "": partial(sequence_arguments, anchor=True),
        "no gradient": partial(sequence_arguments, anchor=False),
    },
    "embedding_bag_inference": {
        f"{kind} {pooling.name}": partial(bag_inference_arguments, kind, pooling)
        for kind, pooling in pooled_kinds()
    }
    | {
        name: partial(bag_inference_arguments, "plain", Pooling.SUM, stored=name) for name in STORED
    },
    "embedding_inference": {"": sequence_inference_arguments},
    "reduce_grad": {
        f"{kind} {pooling.name}": partial(reduce_arguments, kind, pooling)
        for kind, pooling in pooled_kinds()
    },
    "bag_weight_grad": {
        pooling.name: partial(reduce_arguments, "weighted", pooling)
        for pooling in (Pooling.SUM, Pooling.MEAN)
    },
    "materialize_": {
        "element state": partial(materialize_arguments, "adagrad"),
        "row state": partial(materialize_arguments, "rowwise_adagrad"),
        **{name: partial(materialize_arguments, name) for name in STORED},
    },
    "accumulate_grad_": {
        f"{kind} {pooling.name}": partial(pending_arguments, kind, pooling)
        for kind, pooling in pooled_kinds()
    },
    "merge_grad_": {"": merge_arguments},
}
for _name in OPTIMIZERS:
    CASES[f"{_name}_update_"] = {"": partial(update_arguments, _name)}
    CASES[f"{_name}_backward_"] = {
        "plain SUM": partial(backward_arguments, _name, "plain", Pooling.SUM),
        "weighted MEAN": partial(backward_arguments, _name, "weighted", Pooling.MEAN),
    }
for _name in STORED:
    CASES["adam_update_"][_name] = partial(update_arguments, _name)
    CASES["adam_backward_"][_name] = partial(backward_arguments, _name, "plain", Pooling.SUM)
