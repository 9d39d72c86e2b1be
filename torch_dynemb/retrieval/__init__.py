"""The output side of retrieval models: losses over a table without a vocabulary, and search."""

from torch_dynemb.retrieval.full_softmax import FullSoftmaxLoss
from torch_dynemb.retrieval.id_names import IdNames
from torch_dynemb.retrieval.negatives import (
    FrequencyNegatives,
    InBatchNegatives,
    UniformNegatives,
)
from torch_dynemb.retrieval.sampled_softmax import SampledSoftmaxLoss, in_batch_softmax_loss
from torch_dynemb.retrieval.search import top_k
from torch_dynemb.retrieval.vectors import export_vectors

__all__ = [
    "FrequencyNegatives",
    "FullSoftmaxLoss",
    "IdNames",
    "InBatchNegatives",
    "SampledSoftmaxLoss",
    "UniformNegatives",
    "export_vectors",
    "in_batch_softmax_loss",
    "top_k",
]
