"""A small model with what packages may have, and its package, made once for all tests."""

from __future__ import annotations

from pathlib import Path

import torch
from quick_packages import QUICK
from seeding import seeded
from torch import Tensor, nn
from torch._inductor import config
from torch.export import Dim

import torch_dynemb as td

VERSION = "monday"
MANY = 100_000
HEADROOM = 300

Features = dict[str, Tensor | tuple[Tensor, Tensor]]


class SmallModel(nn.Module):
    """Two tables of different dims, a dense layer, a constant of one element, three outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = td.DynamicEmbeddingBagCollection(
            [td.TableConfig("u", 8), td.TableConfig("v", 4, eval_default="zeros")],
            optimizer=td.SGD(lr=0.1),
        )
        self.top = nn.Linear(12, 1)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, features: Features, shift: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        pooled = self.bags(features)
        score = self.top(pooled) * self.scale + shift
        return score, {"pooled": pooled, "scale": self.scale}


def features(batch: int, ids: int, seed: int = 0) -> tuple[Features, Tensor]:
    """Inputs of the model: so many bags, of ``u`` with so many ids together."""
    random = seeded(seed)
    cuts = torch.randint(0, ids + 1, (batch,), generator=random).sort().values
    offsets = torch.cat([cuts.new_zeros(1), cuts[1:], cuts.new_tensor([ids])])
    if batch == 0:
        offsets = torch.zeros(1, dtype=torch.int64)
    u = torch.randint(0, 200, (ids if batch else 0,), generator=random)
    v = torch.randint(0, 200, (batch, 3), generator=random)
    return {"u": (u, offsets), "v": v}, torch.rand(batch, 1, generator=random)


def small_model(seed: int = 0, many: int = MANY) -> SmallModel:
    """A model that knows ids below 100, and in ``v`` so many more that a leak of it is seen."""
    torch.manual_seed(seed)
    model = SmallModel()
    group = model.bags.group
    group.insert_or_assign(0, torch.arange(100), torch.randn(100, 8))
    many = torch.cat([torch.arange(100), torch.arange(1000, 1000 + many)])
    group.insert_or_assign(1, many, torch.randn(many.numel(), 4))
    return model


def dynamic_shapes() -> tuple[object, ...]:
    """What changes from run to run: the batch, and the number of ids."""
    batch = Dim.DYNAMIC
    return ({"u": ({0: Dim.DYNAMIC}, {0: batch}), "v": {0: batch}}, {0: batch})


def make_package(folder: Path) -> nn.Module:
    """Writes the package; returns the frozen model, which it must be equal to."""
    frozen = td.freeze(small_model())
    export(frozen, folder)
    return frozen


def make_live_package(
    folder: Path, *, headroom: int = HEADROOM, in_file: bool = False
) -> nn.Module:
    """Writes a package with rows to update, and beside it the checkpoint that is its base.

    Args:
        folder: of the package.
        headroom: of each table.
        in_file: rows lie in a file.

    Returns:
        The frozen model that the package was made of.
    """
    model = small_model(many=10)
    td.checkpoint.save(base_of(folder), model)
    storage = td.SSDStore(folder.with_name("rows"), cache="50%") if in_file else None
    frozen = td.freeze(model, storage=storage)
    export(frozen, folder, headroom=headroom, base=base_of(folder))
    return frozen


def base_of(folder: Path) -> Path:
    """The checkpoint with the content of the live package."""
    return folder.with_name("base")


def export(
    frozen: nn.Module, folder: Path, headroom: int | None = None, base: Path | None = None
) -> None:
    """Writes a package of the small model."""
    with config.patch(QUICK):
        td.serving.export(
            frozen,
            folder,
            features(4, 20),
            dynamic_shapes=dynamic_shapes(),
            headroom=headroom,
            version=VERSION,
            missing=True,
            base=base,
        )
