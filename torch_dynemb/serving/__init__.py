"""Tables that are only read."""

from torch_dynemb.serving.freeze import freeze, freezes
from torch_dynemb.serving.frozen_modules import (
    FrozenBagCollection,
    FrozenCollection,
    FrozenEmbedding,
    FrozenEmbeddingBag,
    FrozenModule,
)
from torch_dynemb.serving.frozen_tables import FrozenTables

__all__ = [
    "FrozenBagCollection",
    "FrozenCollection",
    "FrozenEmbedding",
    "FrozenEmbeddingBag",
    "FrozenModule",
    "FrozenTables",
    "freeze",
    "freezes",
]
