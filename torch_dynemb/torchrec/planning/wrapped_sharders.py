"""TorchRec's sharders around the sharders of collections, as planners see them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torch_dynemb.torchrec.planning.choice import TableChoice
from torch_dynemb.torchrec.planning.chosen_tables import configs_of


class _ProcessedSharder(FeatureProcessedEmbeddingBagCollectionSharder):  # type: ignore[misc]
    """TorchRec's sharder of feature-processed collections, with the kernels of the one inside.

    Args:
        inner: sharder of the collections, which chooses dynamic tables.
        qcomm_codecs_registry: of the outer sharder.
    """

    def __init__(self, inner: Any, qcomm_codecs_registry: Any) -> None:
        super().__init__(inner, qcomm_codecs_registry)
        self.choice: TableChoice = inner.choice
        self.optimizer = inner.optimizer

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        kernels: list[str] = self._ebc_sharder.compute_kernels(sharding_type, compute_device_type)
        return kernels


def planned_sharder(sharder: Any) -> Any:
    """Return a sharder with the kernels and the choice of tables of the one that it wraps.

    Raises:
        NotImplementedError: the inner sharder has ``use_index_dedup`` or chooses dynamic tables,
            which the modules of the outer one do not support.
    """
    inner = next(
        (
            of
            for of in vars(sharder).values()
            if isinstance(getattr(of, "choice", None), TableChoice)
        ),
        None,
    )
    if inner is None:
        return sharder
    if isinstance(sharder, FeatureProcessedEmbeddingBagCollectionSharder):
        if inner._use_index_dedup:
            raise NotImplementedError(
                f"{type(sharder).__name__}: the {inner.choice.owner} in it has use_index_dedup, "
                "which pools bags on the rank of the batch, but feature processors compute their "
                "weights on that of the rows: leave use_index_dedup out"
            )
        return _ProcessedSharder(inner, sharder.qcomm_codecs_registry)
    if inner.choice.chooses_any:
        raise NotImplementedError(
            f"{type(sharder).__name__}: the {inner.choice.owner} in it has tables=, but "
            f"{sharder.module_type.__name__} replaces ids by row numbers of static tables: give it "
            "a sharder without tables=, and dynamic tables an EmbeddingBagCollection or "
            "EmbeddingCollection of their own"
        )
    return sharder


def check_processors_learn(
    module: nn.Module, sharders: Sequence[Any], dynamic: Collection[str]
) -> None:
    """Check that feature processors of dynamic tables on several ranks get gradients.

    Args:
        module: the model.
        sharders: of its modules.
        dynamic: names of the tables to make dynamic.

    Raises:
        ValueError: a feature-processed collection has no sharder of its own, so its processors
            compute weights before ranks exchange them, which is without gradients.
    """
    if any(isinstance(of, FeatureProcessedEmbeddingBagCollectionSharder) for of in sharders):
        return
    for path, found in module.named_modules():
        if not isinstance(found, FeatureProcessedEmbeddingBagCollection):
            continue
        tables = [of.name for of in configs_of(found) if of.name in dynamic]
        if tables:
            raise ValueError(
                f"sharders has none of {path!r}, a FeatureProcessedEmbeddingBagCollection with "
                f"dynamic tables {tables}, but without one its processors get no gradients: give "
                "FeatureProcessedEmbeddingBagCollectionSharder(sharder) of "
                "torchrec.distributed.fp_embeddingbag, with the sharder of dynamic tables"
            )


__all__ = ["check_processors_learn", "planned_sharder"]
