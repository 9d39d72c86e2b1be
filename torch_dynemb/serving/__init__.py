"""Tables that are only read."""

from torch_dynemb.serving.choices import Choices
from torch_dynemb.serving.freeze import freeze, freezes
from torch_dynemb.serving.frozen_modules import (
    FrozenBagCollection,
    FrozenCollection,
    FrozenEmbedding,
    FrozenEmbeddingBag,
    FrozenModule,
    ReadOnly,
    converted_dtype,
)
from torch_dynemb.serving.frozen_tables import FrozenTables
from torch_dynemb.serving.missing import CountsMissing

__all__ = [
    "Choices",
    "CountsMissing",
    "FrozenBagCollection",
    "FrozenCollection",
    "FrozenEmbedding",
    "FrozenEmbeddingBag",
    "FrozenModule",
    "FrozenTables",
    "ReadOnly",
    "converted_dtype",
    "freeze",
    "freezes",
]
