"""What ranks do in tests of lookups over several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lookups import option

import torch_dynemb as td
from torch_dynemb.recis import (
    AdmitHook,
    DynamicEmbedding,
    EmbeddingEngine,
    EmbeddingOption,
    FilterHook,
    RaggedTensor,
    SparseAdam,
    filter_out_sparse_param,
)
from torch_dynemb.recis.tables.hooks import RowFilter, register_filter_hook

SEED = 5


@register_filter_hook("KeepsTime")
class KeepsTime(RowFilter):
    """Removes nothing, but has tables keep times."""

    scores = ("timestamp",)

    def remove(self, group: Any, table: int) -> int:
        return 0


@register_filter_hook("KeepsScores")
class KeepsScores(KeepsTime):
    """Removes nothing, but has tables keep custom scores."""

    def __init__(self, combine: Any) -> None:
        decay = {"half_life_steps": 1} if combine == "decayed_sum" else {}
        self.scores = (td.Custom(combine=combine, **decay),)


def scored(rank: int, combine: str, parts: list[list[range]]) -> dict[int, float]:
    """Train two features of one table with scores; return the scores of its ids here."""
    torch.manual_seed(SEED)
    hook = FilterHook("KeepsScores", {"combine": combine})
    options = {
        "history": option(combiner="sum", filter_hook=hook, score_from="worth"),
        "clicked": option(combiner="mean", filter_hook=hook, score_from="rating"),
    }
    engine = EmbeddingEngine(options)
    optimizer = SparseAdam(filter_out_sparse_param(engine), lr=0.1)
    for step, samples in enumerate(parts):
        given = batch(samples[rank], step)
        ids = given["clicked"].values()
        output = engine(
            {
                "history": given["history"],
                "clicked": given["clicked"],
                "worth": torch.tensor([s * 37 % 23 / 2 for s in samples[rank]]),
                "rating": ids * 7 % 11 + 1,
            }
        )
        sum(output[name].sum() for name in options).backward()
        optimizer.step()
    (table,) = engine.tables.values()
    (owned,) = (table.ids(child) for child in table.children_hashtable)
    scores = table.group.scores.get(0, owned).scores
    return dict(zip(owned.tolist(), scores.tolist(), strict=True))


def features(grad_reduce_by: str = "worker") -> dict[str, EmbeddingOption]:
    """Features of three tables: all combiners, weights, three dimensions, int8."""
    kind = {"grad_reduce_by": grad_reduce_by}
    tile = {"combiner": "tile", "combiner_kwargs": {"tile_len": 3}}
    return {
        "clicked": option(combiner="mean", **kind),
        "candidate": option(**kind),
        "history": option(**tile, **kind),
        "user": option("user", **kind),
        "wide": option("wide", embedding_dim=8, **kind),
        "counted": option(
            "counted",
            embedding_dim=6,
            admit_hook=AdmitHook("Frequency", {"threshold": 2, "half_life_steps": 2}),
            **kind,
        ),
        "content": option("content", dtype=torch.int8, fp16_enabled=True, **kind),
    }


def ragged(samples: range, seed: int, weighted: bool) -> RaggedTensor:
    """Rows of samples: the same whichever rank has them."""
    values, lengths, weights = [], [], []
    for sample in samples:
        generator = torch.Generator().manual_seed(100 * seed + sample)
        length = int(torch.randint(0, 6, (), generator=generator))
        values.append(torch.randint(-20, 20, (length,), generator=generator))
        weights.append(torch.rand(length, generator=generator))
        lengths.append(length)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.cat([torch.zeros(0, dtype=torch.int64), *values])
    weight = torch.cat([torch.zeros(0), *weights]) if weighted else None
    return RaggedTensor(ids, offsets, weight)


def batch(samples: range, step: int) -> dict[str, Any]:
    """Some samples of a step."""
    of_step = 10 * step
    users = torch.tensor([[[s % 7, -s], [s, 3]] for s in samples], dtype=torch.int64)
    return {
        "clicked": ragged(samples, of_step, True),
        "candidate": torch.tensor([[s % 5] for s in samples], dtype=torch.int64).reshape(-1, 1),
        "history": ragged(samples, of_step + 1, True),
        "user": users.reshape(-1, 2, 2),
        "wide": ragged(samples, of_step + 2, False),
        "counted": ragged(samples, of_step + 3, False),
        "content": ragged(samples, of_step + 4, False),
    }


def content() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 8 bits that are inserted."""
    ids = torch.arange(-20, 20)
    return ids, torch.randn(40, 4, generator=torch.Generator().manual_seed(1))


def insert_content(engine: EmbeddingEngine, rank: int, size: int) -> None:
    """Each rank inserts some rows, of ids of all ranks."""
    ids, rows = content()
    engine.insert("content", ids[rank::size], rows[rank::size])


def trained(
    rank: int,
    size: int,
    parts: list[list[range]],
    grad_reduce_by: str = "worker",
    compiled: bool = False,
    names: list[str] | None = None,
    forwards: int = 1,
) -> tuple[list[dict[str, torch.Tensor]], dict[str, tuple[list[int], torch.Tensor]]]:
    """Trains; returns the outputs of every step, and ids and rows by table.

    Args:
        parts: by step, the samples of every rank.
        names: features; default: all.
        forwards: of each step; samples are dealt to them, and one backward follows.
    """
    torch.manual_seed(SEED if rank == 0 else 99)  # rank 0's counts
    chosen = features(grad_reduce_by)
    engine = EmbeddingEngine({name: chosen[name] for name in names or chosen})
    if names is None:
        insert_content(engine, rank, size)
    optimizer = SparseAdam(filter_out_sparse_param(engine), lr=0.1)
    outputs = []
    run = engine
    if compiled:
        torch._dynamo.config.capture_scalar_outputs = True
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
        run = torch.compile(engine, fullgraph=True)  # type: ignore[assignment]
    for step, samples in enumerate(parts):
        given = [samples[rank]]
        if forwards > 1:
            ends = [len(given[0]) * k // forwards for k in range(forwards + 1)]
            given = [given[0][i:j] for i, j in pairwise(ends)]
        data = [batch(of, step) for of in given]
        each = [run({name: of[name] for name in names or of}) for of in data]
        output = {name: torch.cat([of[name] for of in each]) for name in each[0]}
        total = sum(len(part) for part in samples)
        # the mean over ranks of these gradients is that of the mean loss of all samples
        losses = [out.float().square().sum() for out in output.values()]
        loss = torch.stack(losses).sum() * size / total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append({name: out.detach() for name, out in output.items()})
    content_of = {}
    for table in filter_out_sparse_param(engine).values():
        for child in table.children_hashtable:
            content_of[child] = (table.ids(child).tolist(), table.embeddings(child))
    return outputs, content_of


def one_group_each(rank: int, samples: range) -> list[dict[str, torch.Tensor]]:
    """A group of this rank alone, beside a default group of two: what is given is what counts."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    torch.manual_seed(SEED)
    engine = EmbeddingEngine(features(), pg=groups[rank])
    insert_content(engine, 0, 1)
    module = DynamicEmbedding(option(pg=groups[rank]))
    alone = module(torch.tensor([[1, 2]]))
    output = engine(batch(samples, 0))
    return [{name: out.detach() for name, out in output.items()}, {"alone": alone.detach()}]


def other_group_refused(rank: int) -> str:
    """Constructs on a rank that is no member of the group."""
    group = dist.new_group([0])
    if rank == 0:
        return ""
    try:
        DynamicEmbedding(option(), pg=group)
    except ValueError as error:
        return str(error)
    return "no error"


def different_options(rank: int) -> dict[str, str]:
    """What is raised where this rank is given something else than the other."""
    mine = [0.1, 0.2][rank]

    def optimizer(lr: float, **options: Any) -> SparseAdam:
        table = DynamicEmbedding(option(**options))
        return SparseAdam(filter_out_sparse_param(table), lr=lr)

    names = ["clicked", "user"] if rank == 0 else ["user", "clicked"]
    calls: dict[str, Callable[[], Any]] = {
        "initializer": lambda: DynamicEmbedding(option(initializer=td.Normal(0.0, mine))),
        "order": lambda: EmbeddingEngine({name: features()[name] for name in names}),
        "hook": lambda: EmbeddingEngine(
            {
                "user": option("user"),
                "item": option(admit_hook=AdmitHook("Frequency", {"threshold": 2 + rank})),
            }
        ),
        "lr": lambda: optimizer(mine),
        "sizes": lambda: optimizer(0.1, block_size=10 + rank),
    }
    raised = {}
    for name, call in calls.items():
        try:
            call()
            raised[name] = ""
        except ValueError as error:
            raised[name] = str(error)
    return raised


def wrong_input(rank: int, samples: list[range]) -> dict[str, str]:
    """What all ranks raise if the input of rank 1 is wrong, by case; good batches go on."""
    torch.manual_seed(SEED)
    engine, alike = EmbeddingEngine(features()), EmbeddingEngine(features())
    one, one_alike = (DynamicEmbedding(option("one")) for _ in range(2))
    good = batch(samples[rank], 0)
    ids = torch.arange(4)[:, None]
    found = {}

    def note(case: str, module: Any, wrong: Any, good: Any) -> None:
        try:
            module(*(wrong if rank == 1 else good))
            found[case] = "nothing"
        except Exception as error:
            found[case] = f"{type(error).__name__}: {error.args[0]}"

    note("no dict", engine, ([],), (good,))
    note("missing", engine, ({},), (good,))
    note("floats", engine, ({**good, "wide": ids.float()},), (good,))
    note("a list", engine, ({**good, "candidate": [1]},), (good,))
    note("one: floats", one, (ids.float(),), (ids,))
    note("one: weights", one, (ids, torch.rand(2)), (ids, torch.rand(4, 1)))
    note("one: a list", one, ([1],), (ids,))
    for table in engine.tables.values():
        assert all(len(table.ids(child)) == 0 for child in table.children_hashtable)
    outputs = [of(good)["clicked"].tolist() for of in (engine, alike)]
    assert outputs[0] == outputs[1]
    assert torch.equal(one(ids), one_alike(ids))
    return found


def saved_and_loaded(rank: int, samples: list[range]) -> list[str]:
    """A rank's state goes back to the rank, and to no other; returns what loading says."""
    torch.manual_seed(SEED)
    engine, other = EmbeddingEngine(features()), EmbeddingEngine(features())
    optimizers = [SparseAdam(filter_out_sparse_param(e), lr=0.1) for e in (engine, other)]
    engine(batch(samples[rank], 0))["clicked"].sum().backward()
    optimizers[0].step()
    state = engine.state_dict()
    other.load_state_dict(state)
    for mine, loaded in zip(
        filter_out_sparse_param(engine).values(),
        filter_out_sparse_param(other).values(),
        strict=True,
    ):
        for child in mine.children_hashtable:
            assert torch.equal(mine.embeddings(child), loaded.embeddings(child))
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    try:
        other.load_state_dict(states[1 - rank])
    except RuntimeError as error:
        return [str(error)]
    return []


def dense_parameters_too(rank: int) -> dict[str, Any]:
    """DistributedDataParallel around the dense part; the embedding is not in it."""
    torch.manual_seed(SEED)
    module = DynamicEmbedding(option(initializer=td.Normal(0.0, 0.1)))
    dense = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = SparseAdam(filter_out_sparse_param(module), lr=0.01)
    for step in range(2):
        ids = torch.arange(3)[:, None] + rank + step
        dense(module(ids)).sum().backward()
        optimizer.step()
    return {"ids": module.hashtable.ids().tolist()}


def times(
    rank: int, starts: list[int], paces: list[int], given: list[int] | None, compiled: bool
) -> list[tuple[int, dict[int, int]]]:
    """Trains by clocks that differ; by step the time of its lookups, and those of all ids here.

    Args:
        starts, paces: seconds by rank: what its clock says first, and how far it goes on by step.
        given: to all ranks by step, in place of their clocks.
    """
    with mock.patch("time.time", return_value=float(starts[rank])) as clock:
        module = DynamicEmbedding(option(filter_hook=FilterHook("KeepsTime")))
        optimizer = SparseAdam(filter_out_sparse_param(module), lr=0.1)
        run: Any = module
        if compiled:
            torch._dynamo.config.capture_scalar_outputs = True
            torch._dynamo.config.capture_dynamic_output_shape_ops = True
            run = torch.compile(module, fullgraph=True)
        group = module.hashtable.group
        result = []
        for step in range(4):
            run(torch.arange(6)[:, None] + 3 * step + rank).sum().backward()
            ids = module.hashtable.ids()
            scores = group.scores.get(0, ids, score="timestamp").scores
            of_ids = dict(zip(ids.tolist(), scores.tolist(), strict=True))
            result.append((int(group.index.clock[1]), of_ids))
            clock.return_value = float(starts[rank] + paces[rank] * step)
            optimizer.step(now=None if given is None else given[step])
    return result


def one_norm(rank: int) -> tuple[float, float]:
    """The norm that clipping returns, and that of the gradients of the rows of both ranks."""
    module = DynamicEmbedding(option())
    SparseAdam(filter_out_sparse_param(module), lr=0.1)
    module(torch.arange(6)[:, None] + 3 * rank).square().sum().backward()
    mine = module.hashtable.grad().gradients.square().sum()
    norm = td.clip_grad_norm_(module, 1e9)
    dist.all_reduce(mine)
    return float(norm), float(mine.sqrt())


def inserted(rank: int, size: int) -> dict[str, Any]:
    """Rows that each rank inserts, and what all ranks say if those of one or of both are wrong.

    Rows are read apart, and by a combiner of users.
    """
    torch.manual_seed(SEED)
    options = {
        "apart": option(no_reduce=True),
        "counted": option(combiner=_counted_rows()),
        "user": option("user"),
    }
    engine = EmbeddingEngine(options)
    ids, rows = torch.arange(-9, 9), torch.arange(72.0).reshape(18, 4)
    wrong = {
        "shape": (ids[: 4 + rank], rows[:4]),
        "twice": (ids[:5] if rank else ids[4:9], rows[:5]),
        "name": (ids[:4], rows[:4]),
        "other": (ids[:4], rows[:4]),
    }
    names = {"name": ("apart", "nothing"), "other": ("apart", "user")}
    errors = {}
    for case, given in wrong.items():
        try:
            engine.insert(names.get(case, ("apart", "apart"))[rank], *given)
        except (KeyError, ValueError) as error:
            errors[case] = str(error)
    (table,) = engine.tables.values()
    assert [len(table.ids(child)) for child in ("item", "user")] == [0, 0]
    engine.insert("apart", ids[rank::size], rows[rank::size])
    engine.insert("user", ids[:0], rows[:0])
    queries = ids[rank::size].flip(0)[:, None]
    found = engine({"apart": queries, "counted": queries, "user": queries})
    emb, inverse, offsets = found["apart"]
    assert offsets.tolist() == list(range(len(queries) + 1))
    emb[inverse].sum().backward()
    return {
        "errors": errors,
        "rows": dict(zip(queries.flatten().tolist(), emb[inverse].tolist(), strict=True)),
        "counted": found["counted"].tolist(),
        "owned": table.ids("item").tolist(),
        "gradients": table.grad("item").gradients.unique().tolist(),
    }


_COMBINERS = itertools.count()  # of this process


def _counted_rows() -> str:
    """Name of a combiner that appends the number of rows to their sum."""
    from torch_dynemb.recis.functional import get_combiner, register_combiner

    name = f"counted rows {next(_COMBINERS)}"

    @register_combiner(name)
    def counted(**arguments: Any) -> torch.Tensor:
        sums = get_combiner("sum")(**{**arguments, "combiner_kwargs": None})
        return torch.cat([sums, arguments["offsets"].diff()[:, None]], 1)

    return name
