"""What a training loop does with the fused optimizer of a sharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import Batch, batches_of_ranks, keyed_jagged
from sharded_models import Table, kernels, sharded
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from unsharded_oracle import rows_by_id

import torch_dynemb as td
from torch_dynemb.torchrec import TableOptions

TABLES = (
    Table("rows", 8, ("a", "b"), sharding="row_wise"),
    Table("whole", 8, ("c",), sharding="table_wise"),
)


def _add_layer(model: nn.Module) -> None:
    torch.manual_seed(0)
    model.over = nn.Linear(8, 1)


def _model() -> Any:
    return sharded(TABLES, optimizer=td.SGD(lr=0.1), prepare=_add_layer)


def _train(model: Any, rank: int, step: int) -> None:
    batch = batches_of_ranks("plain", ["a", "b", "c"], 2, step)[rank]
    outputs = model(keyed_jagged(batch, "plain"))
    torch.stack([of.square().sum() for of in outputs.values()]).sum().backward()


def _rows(model: Any) -> dict[tuple[str, int], list[float]]:
    return {
        (shard.name, id): row.tolist()
        for kernel in kernels(model)
        for t, shard in enumerate(kernel.tables.shards)
        for id, row in rows_by_id(kernel.tables.group, t).items()
    }


def _combined(model: Any) -> CombinedOptimizer:
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.SGD(params, lr=0.1),
    )
    return CombinedOptimizer([("fused", model.fused_optimizer), ("dense", dense)])


def _learning_rates(model: Any) -> list[float]:
    return [
        float(group["lr"])
        for kernel in kernels(model)
        for group in kernel.tables.optimizer.param_groups
    ]


def names(rank: int) -> dict[str, list[str]]:
    """Of parameters, by where they are shown."""
    model = _model()
    return {
        "fused": sorted(model.fused_optimizer.params),
        "combined": sorted(_combined(model).params),
        "dense": [name for name, _ in in_backward_optimizer_filter(model.named_parameters())],
        "in_backward": sorted(
            name for name, _ in in_backward_optimizer_filter(model.named_parameters(), include=True)
        ),
        "param_groups": sorted(
            key for group in model.fused_optimizer.param_groups for key in group
        ),
    }


def _of_parameters(model: Any) -> list[Any]:
    """The optimizer at each parameter of a table."""
    return [
        optimizer
        for parameter in model.parameters()
        for optimizer in getattr(parameter, "_in_backward_optimizers", ())
    ]


def learning_rates(rank: int, kind: str) -> list[tuple[set[float], bool]]:
    """After every step, learning rates of the tables, and whether the step has changed rows."""
    model = _model()
    optimizer: Any = _combined(model)
    scheduler: Any = None
    if kind == "torch":
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1, 0.5, 0)[step])
    elif kind == "torchrec":
        stages = [
            WarmupStage(WarmupPolicy.CONSTANT, max_iters=1, value=1.0),
            WarmupStage(WarmupPolicy.CONSTANT, max_iters=2, value=0.5),
            WarmupStage(WarmupPolicy.CONSTANT, max_iters=100, value=0.0),
        ]
        optimizer = WarmupOptimizer(optimizer, stages, lr=0.1)
    seen = []
    _train(model, rank, 0)  # ids are there from now on
    optimizer.step()
    for step in range(3):
        if scheduler is not None and step > 0:
            scheduler.step()
        if kind == "parameters":
            for of_parameter in _of_parameters(model):
                for group in of_parameter.param_groups:
                    group["lr"] = (0.1, 0.05, 0.0)[step]
        optimizer.zero_grad()
        before = _rows(model)
        rates = set(_learning_rates(model))
        _train(model, rank, 0)
        seen.append((rates, before != _rows(model)))
        optimizer.step()
    return seen


def saved_and_loaded(rank: int) -> dict[str, Any]:
    """A learning rate that is saved and loaded."""
    model = _model()
    optimizer = _combined(model)
    plain = optimizer.state_dict()
    optimizer.save_param_groups(True)
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    saved = optimizer.state_dict()
    for group in optimizer.param_groups:
        group["lr"] = 0.75
    changed = set(_learning_rates(model))
    optimizer.load_state_dict(saved)
    return {
        "plain": sorted(plain),
        "saved": sorted(saved),
        "changed": changed,
        "loaded": set(_learning_rates(model)),
    }


def untrained(rank: int) -> dict[str, Any]:
    """What training leaves of a table with ``trainable=False`` beside a trained one."""
    trained = sharded(TABLES, optimizer=td.Adam(lr=0.1), prepare=_add_layer)
    _train(trained, rank, 0)
    options = {
        "rows": TableOptions(trainable=False, eval_default="zeros"),
        "whole": TableOptions(),
    }
    model = sharded(TABLES, optimizer=td.Adam(lr=0.1), options=options, prepare=_add_layer)
    model.load_state_dict(trained.state_dict())
    loaded, same = _rows(model), _rows(trained)
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.5  # as a scheduler does
    for step in (0, 1):  # known ids, and others
        _train(model, rank, step)
        model.fused_optimizer.step()
    after = _rows(model)
    of_table = {name: [key for key in after if key[0] == name] for name in ("rows", "whole")}
    state = model.state_dict()
    return {
        "loaded": loaded == same,
        "ids": len(of_table["rows"]),
        "untrained": all(after[key] == loaded.get(key) for key in of_table["rows"]),
        "trained": any(after[key] != loaded.get(key) for key in of_table["whole"]),
        "states": sorted({key.split(".")[2] for key in state if ".optimizer." in key}),
    }


def clocks(rank: int, ends: str) -> dict[int, int]:
    """Scores of ids by the step in which they were seen."""
    options = TableOptions(policy=td.Policy(score="step"))
    model = sharded(
        [Table("users", 8, ("user",)), Table("ads", 8, ("ad",))],
        options={"users": options, "ads": options},
        optimizer=td.SGD(lr=0.1),
    )
    for id in range(6):
        ids = [torch.tensor([id, 100])]
        outputs = model(keyed_jagged(Batch({"user": ids, "ad": ids}), "plain"))
        (outputs["user"] + outputs["ad"]).sum().backward()
        if ends == "the optimizer":
            model.fused_optimizer.step()
        elif ends == "those of parameters":
            for of_parameter in _of_parameters(model):
                of_parameter.step()
    return {
        id: score
        for kernel in kernels(model)
        for of in kernel.tables.group.export(0)
        for id, score in zip(of.ids.tolist(), of.scores.tolist(), strict=True)
    }


def reads(rank: int) -> tuple[int, int]:
    """How many rows there are after training, and after evaluation of other ids."""
    model = _model()
    _train(model, rank, 0)
    trained = len(_rows(model))
    model.eval()
    other = Batch({name: [torch.tensor([1, 2, 3])] for name in "abc"})
    model(keyed_jagged(other, "plain"))
    model.train()
    with torch.no_grad():
        model(keyed_jagged(other, "plain"))
    return trained, len(_rows(model))


MICRO_BATCHES = 2
OF_ALL_SHARDINGS = (
    Table("rows", 8, ("a", "b"), "mean", "row_wise"),
    Table("whole", 12, ("c",), "sum", "table_wise"),
    Table("columns", 16, ("d",), "sum", "column_wise"),
    Table("each", 8, ("e",), "none", "row_wise"),
)


def accumulated(
    rank: int, split: bool, one_backward: bool = False
) -> dict[str, list[torch.Tensor]]:
    """Trains on micro-batches in split mode, else on whole batches; what is saved of this rank.

    Args:
        one_backward: add the losses of micro-batches, outside of split mode.
    """
    options = {
        table.name: TableOptions(initializer=td.Normal(), split=split) for table in OF_ALL_SHARDINGS
    }
    torch.manual_seed(0)
    model = sharded(OF_ALL_SHARDINGS, options=options, optimizer=td.Adam(lr=0.1, row_steps=True))
    features = [feature for table in OF_ALL_SHARDINGS for feature in table.features]
    for step in range(3):
        parts = [
            batches_of_ranks("plain", features, dist.get_world_size(), step + 10 * part, 30)[rank]
            for part in range(MICRO_BATCHES)
        ]
        whole = Batch({name: [bag for of in parts for bag in of.ids[name]] for name in features})
        model.fused_optimizer.zero_grad()
        losses = []
        for batch in parts if split or one_backward else [whole]:
            outputs = model(keyed_jagged(batch, "plain"))
            losses.append(torch.stack([of.square().sum() for of in outputs.values()]).sum())
            if not one_backward:
                losses.pop().backward()
        if losses:
            torch.stack(losses).sum().backward()
        model.fused_optimizer.step()
    return _local(model.state_dict())


def _local(state: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """What a state dict has of this rank."""
    return {
        name: [shard.tensor for shard in entry.local_shards()]
        if isinstance(entry, ShardedTensor)
        else [entry]
        for name, entry in state.items()
    }


def forgotten(rank: int) -> tuple[bool, bool, bool]:
    """Whether rows are as before after a backward, after zero_grad and step, and after a step."""
    options = {
        table.name: TableOptions(initializer=td.Normal(), split=True) for table in TABLES[:1]
    }
    model = sharded(TABLES[:1], options=options, optimizer=td.SGD(lr=0.1))
    features = keyed_jagged(batches_of_ranks("plain", ["a", "b"], 2, 0)[rank], "plain")

    def backward() -> None:
        torch.stack([of.square().sum() for of in model(features).values()]).sum().backward()

    model(features)
    before, unchanged = _rows(model), []
    backward()
    unchanged.append(_rows(model) == before)
    for owner in (model.fused_optimizer, model):
        backward()
        owner.zero_grad()
        model.fused_optimizer.step()
    unchanged.append(_rows(model) == before)
    backward()
    model.fused_optimizer.step()
    unchanged.append(_rows(model) == before)
    return unchanged[0], unchanged[1], unchanged[2]


def clipped(rank: int, norm_type: float) -> tuple[float, float, float]:
    """The norm that clipping returns, that of all gradients before, and that of them after."""
    options = {table.name: TableOptions(initializer=td.Normal(), split=True) for table in TABLES}
    model = sharded(TABLES, options=options, optimizer=td.SGD(lr=0.1), prepare=_add_layer)
    for step in range(2):
        _train(model, rank, step)
    before = _norm_of_all(model, norm_type)
    norm = td.clip_grad_norm_(model, 0.5, norm_type)
    optimizers = td.table_optimizers(model)
    assert [id(o) for o in optimizers] == [id(k.tables.optimizer) for k in kernels(model)]
    return float(norm), before, _norm_of_all(model, norm_type)


def _norm_of_all(model: Any, norm_type: float) -> float:
    """Of the dense part, which is the same on all ranks, and of the rows of all of them."""
    stand_ins = [s for kernel in kernels(model) for s in kernel.tables.optimizer.stand_ins()]
    # copies: a view brings the whole reservation along
    mine = [s.grad.clone().flatten() for s in stand_ins if s.grad is not None]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    dense = [p.grad.flatten() for n, p in model.named_parameters() if "over" in n]
    return float(torch.cat([*dense, *(g for of in of_ranks for g in of)]).norm(norm_type))


def scaling_refused(rank: int) -> bool:
    """Whether rows are as before a backward of a scaled loss, which raises on every rank."""
    options = {t.name: TableOptions(initializer=td.Normal(), split=True) for t in TABLES[:1]}
    model = sharded(TABLES[:1], options=options, optimizer=td.SGD(lr=0.1))
    features = keyed_jagged(batches_of_ranks("plain", ["a", "b"], 2, 0)[rank], "plain")
    loss = torch.stack([of.square().sum() for of in model(features).values()]).sum()
    before = _rows(model)
    with pytest.raises(RuntimeError, match=r"GradScaler: ranks share the rows of .*bfloat16"):
        torch.amp.GradScaler("cpu").scale(loss).backward()
    return _rows(model) == before


def clipping_refused(rank: int) -> None:
    """Raises."""
    model = _model()
    _train(model, rank, 0)
    td.clip_grad_norm_(model, 1.0)
