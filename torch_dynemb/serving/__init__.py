"""Models for inference, with read-only tables or with tables that are updated while they serve."""

from torch_dynemb.errors import NoHeadroomError
from torch_dynemb.nn.module_kinds import Choices
from torch_dynemb.serving import following as _following  # noqa: F401 - registers live tables
from torch_dynemb.serving.freeze import freeze
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
from torch_dynemb.serving.live_group import LiveTables
from torch_dynemb.serving.live_models import live, live_tables
from torch_dynemb.serving.missing import CountsMissing
from torch_dynemb.serving.packages.cpp import cpp_flags
from torch_dynemb.serving.packages.export import export
from torch_dynemb.serving.packages.inputs import Input, Size
from torch_dynemb.serving.packages.live_package import LiveStats
from torch_dynemb.serving.packages.load import load
from torch_dynemb.serving.packages.served_model import ServedModel
from torch_dynemb.serving.remote_tables import RemoteModel

__all__ = [
    "Choices",
    "CountsMissing",
    "FrozenBagCollection",
    "FrozenCollection",
    "FrozenEmbedding",
    "FrozenEmbeddingBag",
    "FrozenModule",
    "FrozenTables",
    "Input",
    "LiveStats",
    "LiveTables",
    "NoHeadroomError",
    "ReadOnly",
    "RemoteModel",
    "ServedModel",
    "Size",
    "converted_dtype",
    "cpp_flags",
    "export",
    "freeze",
    "live",
    "live_tables",
    "load",
]
