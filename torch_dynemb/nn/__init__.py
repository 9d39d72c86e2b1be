"""Modules: dynamic tables with the signatures of ``nn.Embedding`` and ``nn.EmbeddingBag``."""

from torch_dynemb.nn.averaged_models import average_tables_too
from torch_dynemb.nn.bag import DynamicEmbeddingBag
from torch_dynemb.nn.clip_grad_norm import clip_grad_norm_
from torch_dynemb.nn.collection import DynamicEmbeddingBagCollection, DynamicEmbeddingCollection
from torch_dynemb.nn.embedding import DynamicEmbedding
from torch_dynemb.nn.features import KeyedJagged
from torch_dynemb.nn.module_kinds import RowOptimizers, SharedRows, register_module
from torch_dynemb.nn.options import ModuleOptions, SingleTableOptions
from torch_dynemb.nn.prefetching import prefetched
from torch_dynemb.nn.private_tables import private_to_rank
from torch_dynemb.nn.replacing import ReplacementReport, replace_embeddings
from torch_dynemb.nn.step_with import StepWith, step_with
from torch_dynemb.nn.table_optimizers import table_optimizers
from torch_dynemb.nn.torch_changes import restore_torch

average_tables_too()

__all__ = [
    "DynamicEmbedding",
    "DynamicEmbeddingBag",
    "DynamicEmbeddingBagCollection",
    "DynamicEmbeddingCollection",
    "KeyedJagged",
    "ModuleOptions",
    "ReplacementReport",
    "RowOptimizers",
    "SharedRows",
    "SingleTableOptions",
    "StepWith",
    "clip_grad_norm_",
    "prefetched",
    "private_to_rank",
    "register_module",
    "replace_embeddings",
    "restore_torch",
    "step_with",
    "table_optimizers",
]
