"""Tables that are only read: copies of models, and packages that serve them."""

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
from torch_dynemb.serving.packages.export import export
from torch_dynemb.serving.packages.load import ServedModel, load
from torch_dynemb.serving.packages.manifest import ServedTable

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
    "ServedModel",
    "ServedTable",
    "converted_dtype",
    "export",
    "freeze",
    "freezes",
    "load",
]
