"""What ranks do in tests of modules with ``process_group=`` that get wrong input on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from shared_row_steps import Model, batch_of, content

import torch_dynemb as td


def raised(call: Callable[[], Any]) -> str:
    """Type and message of what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error.args[0]}"
    return "nothing"


def _step(model: Model, number: int, rank: int) -> tuple[list[float], Any]:
    """Train a batch; return its outputs and the rows of this rank."""
    out = model(*batch_of(number, range(4 * rank, 4 * rank + 4)))
    out.square().mean().backward()
    for optimizer in td.table_optimizers(model):
        optimizer.step()
    return out.tolist(), content(model)


def refused(rank: int) -> dict[str, str]:
    """What all ranks raise if the input of rank 1 is wrong, by case; good batches go on."""
    models = []
    for _ in range(2):
        torch.manual_seed(7)  # of the tables; a model sets another one
        models.append(Model(dist.group.WORLD))
    model, alike = models
    assert _step(model, 0, rank) == _step(alike, 0, rank)
    before = content(model)
    ids, offsets = torch.arange(6), torch.tensor([0, 2, 4])
    both = {"a": ids, "b": ids}
    all_bags = {"user": ids[None], "friend": ids[None], "ad": ids[None]}
    jagged = (["user", "friend", "ad"], ids)
    good_offsets = torch.tensor([0, 1, 2, 3, 4, 5, 6])
    cases: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
        "floats": (model.items, (ids.float(),), (ids,)),
        "a list": (model.items, ([1, 2],), (ids,)),
        "no offsets": (model.tags, (ids,), (ids, offsets)),
        "float offsets": (model.tags, (ids, offsets.float()), (ids, offsets)),
        "decreasing": (model.tags, (ids, torch.tensor([0, 4, 2])), (ids, offsets)),
        "from 1": (model.tags, (ids, offsets + 1), (ids, offsets)),
        "past the end": (model.tags, (ids, torch.tensor([0, 2, 7])), (ids, offsets)),
        "few weights": (model.tags, (ids, offsets, torch.rand(5)), (ids, offsets, torch.rand(6))),
        "missing": (model.bags, ({"user": ids[None]},), (all_bags,)),
        "other sizes": (model.bags, ({**all_bags, "ad": ids.view(2, 3)},), (all_bags,)),
        "float feature": (model.bags, ({**all_bags, "ad": ids[None].float()},), (all_bags,)),
        "jagged": (
            model.bags,
            (td.KeyedJagged(*jagged, torch.tensor([0, 1, 2, 3, 2, 5, 6])),),
            (td.KeyedJagged(*jagged, good_offsets),),
        ),
        "missing rows": (model.rows, ({"a": ids},), (both,)),
        "float rows": (model.rows, ({"a": ids, "b": ids.float()},), (both,)),
        "no dict": (model.rows, (ids,), (both,)),
        "jagged rows": (
            model.rows,
            (td.KeyedJagged(["a", "b"], ids, torch.tensor([0, 3, 7])),),
            (td.KeyedJagged(["a", "b"], ids, torch.tensor([0, 3, 6])),),
        ),
    }
    found = {
        name: raised(lambda case=case: case[0](*case[1 if rank == 1 else 2]))
        for name, case in cases.items()
    }
    scores = {"scores": ids} if rank == 1 else {}
    found["scores"] = raised(lambda: model.items(ids, **scores))
    assert content(model) == before
    model.eval()
    found["in evaluation"] = raised(lambda: model.items(ids.float() if rank == 1 else ids))
    model.train()
    assert _step(model, 1, rank) == _step(alike, 1, rank)
    return found


def apart(rank: int) -> dict[str, str]:
    """What all ranks raise if rank 1 looks up other tables, or does not train them, by case."""
    torch.manual_seed(7)
    options: Any = {"optimizer": td.SGD(lr=0.1), "process_group": dist.group.WORLD}
    user, item = (td.DynamicEmbedding(4, name=name, **options) for name in ("user", "item"))
    unnamed = [td.DynamicEmbedding(4, **options) for _ in range(2)]
    tables = [td.TableConfig(name, 4) for name in ("a", "b", "c", "d")]
    many = td.DynamicEmbeddingCollection(tables, **options)
    frozen = td.DynamicEmbedding(4, name="frozen", **options).requires_grad_(rank == 0)
    ids = torch.arange(6)
    of_many = {table.name: ids for table in tables}
    cases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "order": (lambda: user(ids), lambda: item(ids)),
        "features": (lambda: user(ids), lambda: many(of_many)),
        "unnamed": (lambda: unnamed[0](ids), lambda: unnamed[1](ids)),
        "frozen": (lambda: frozen(ids), lambda: frozen(ids)),
        "eval": (lambda: user(ids), lambda: user.eval()(ids)),
    }
    found = {name: raised(lambda case=case: case[rank]()) for name, case in cases.items()}
    user.train()
    for module in (user, item, *unnamed, frozen, many):
        assert not any(module.sizes().values())
    user(ids).sum().backward()
    assert sorted(user.ids().tolist()) == sorted(i for i in range(6) if i in user)
    return found


def many_features(rank: int) -> dict[str, Any]:
    """Rows and sizes of more features than the first message of a lookup has numbers for."""
    tables = [td.TableConfig(f"t{t}", 2, initializer=td.Constant(float(t))) for t in range(70)]
    options: Any = {"optimizer": td.SGD(lr=1.0), "process_group": dist.group.WORLD}
    features = td.DynamicEmbeddingCollection(tables, **options)
    ids = {table.name: torch.arange(t % 3 + rank) for t, table in enumerate(tables)}
    rows = features(ids)
    torch.stack([of.sum() for of in rows.values()]).sum().backward()
    read = features.eval()(ids)
    trained = {name: of.detach() for name, of in rows.items()}
    return {"trained": trained, "read": read, "sizes": features.sizes()}
