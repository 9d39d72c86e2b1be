"""Two models that differ in their tables only, and packages of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

import torch_dynemb as td

DIM = 16
FEATURES = 8


class Served(nn.Module):
    """Bags of several features, and three dense layers.

    Args:
        bags: makes (B, FEATURES * DIM) of a dict of ids (B, L).
    """

    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.top = nn.Sequential(
            *(nn.Linear(FEATURES * DIM, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()),
            nn.Linear(32, 1),
        )

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return torch.sigmoid(self.top(self.bags(features)))


class StaticBags(nn.Module):
    """One nn.EmbeddingBag a feature; row numbers instead of ids."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {name: nn.EmbeddingBag(rows, DIM, mode="sum") for name in feature_names()}
        )

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return torch.cat([bag(features[name]) for name, bag in self.bags.items()], dim=1)


def feature_names() -> list[str]:
    return [f"f{number}" for number in range(FEATURES)]


def dynamic_model(ids: int) -> Served:
    """Return our model: every table knows ids 0 to ``ids``, times a number that scatters them."""
    bags = td.DynamicEmbeddingBagCollection(
        [td.TableConfig(name, DIM) for name in feature_names()], optimizer=td.SGD(lr=0.1)
    )
    for number in range(FEATURES):
        bags.group.insert_or_assign(number, id_of(torch.arange(ids)), torch.randn(ids, DIM))
    return Served(bags)


def id_of(row: Tensor) -> Tensor:
    """Return a 64-bit id of a row number."""
    return row * 0x9E3779B97F4A7C1 + 12345


def batch(rows: int, size: int, length: int, seed: int) -> dict[str, Tensor]:
    """Return uniform row numbers, (size, length) of each feature."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, rows, (size, length), generator=generator)
        for name in feature_names()
    }


def write_packages(folder: Path, ids: int, length: int) -> tuple[Path, Path]:
    """Write packages: ours by serving.export, the static one by AOTInductor."""
    ours, peer = folder / f"ours-{length}", folder / f"static-{length}.pt2"
    example = batch(ids, 4, length, 0)
    export(dynamic_model(ids), ours, example)
    program = torch.export.export(
        Served(StaticBags(ids)).eval(), (example,), dynamic_shapes=any_batch(example)
    )
    torch._inductor.aoti_compile_and_package(program, package_path=str(peer))
    return ours, peer


def write_live_package(folder: Path, ids: int, length: int) -> Path:
    """Return our model as live tables, with room for a hundred ids more."""
    path = folder / f"live-{length}"
    export(dynamic_model(ids), path, batch(ids, 4, length, 0), headroom=100)
    return path


def export(
    model: Served, path: Path, example: dict[str, Tensor], headroom: int | None = None
) -> None:
    ids = {name: id_of(rows) for name, rows in example.items()}
    td.serving.export(model, path, (ids,), dynamic_shapes=any_batch(example), headroom=headroom)


def any_batch(example: dict[str, Tensor]) -> tuple[dict[str, dict[int, object]], ...]:
    """Return ``dynamic_shapes`` of samples of one length."""
    return ({name: {0: Dim.DYNAMIC} for name in example},)
