"""Dynamic tables in place of static ones, in the configuration of TorchRec's own tests."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from hypothesis import assume
from static_rows import insert_static_rows
from torch import Tensor, nn
from torchrec.distributed import model_parallel, sharding_plan, train_pipeline
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import get_qcomm_codecs_registry
from torchrec.distributed.types import ModuleSharder, ShardingType

from torch_dynemb.table.dense_state import dense_only
from torch_dynemb.torchrec import (
    DynamicDMPCollection,
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    DynamicEmbeddingShardingPlanner,
    PrefetchTrainPipeline,
    TableOptions,
)
from torch_dynemb.torchrec.collections.dynamic_part import DynamicPart
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL

_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value  # refused for dynamic tables
_LAYOUT = ".layout"  # an entry that the state dict has for each dynamic table
# as TorchRec's kernels, which look a table up twice before a backward
OPTIONS = TableOptions(delayed_gradients="apply")


class DynamicBags(DynamicEmbeddingBagCollectionSharder):  # type: ignore[misc]
    """In place of TestEBCSharder: one sharding type, and dynamic tables."""

    def __init__(
        self, sharding_type: str, fused_params: dict[str, Any] | None, codecs: Any = None
    ) -> None:
        super().__init__(fused_params, codecs, tables="all", options=OPTIONS)
        self._sharding_type, self._kernel_type = sharding_type, DYNAMIC_KERNEL

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [self._sharding_type]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [self._kernel_type]


class DynamicSequences(DynamicEmbeddingCollectionSharder):  # type: ignore[misc]
    """In place of TestEmbeddingCollectionSharder."""

    def __init__(
        self,
        sharding_type: str,
        fused_params: dict[str, Any] | None,
        codecs: Any = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, codecs, use_index_dedup, tables="all", options=OPTIONS)
        self._sharding_type, self._kernel_type = sharding_type, DYNAMIC_KERNEL

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [self._sharding_type]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [self._kernel_type]


class DynamicDefaultBags(DynamicEmbeddingBagCollectionSharder):  # type: ignore[misc]
    """In place of TorchRec's sharder of bags: any sharding type, and dynamic tables."""

    def __init__(self, fused_params: dict[str, Any] | None = None, codecs: Any = None) -> None:
        super().__init__(fused_params, codecs, tables="all", options=OPTIONS)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [DYNAMIC_KERNEL]


def patch_collections(test_sequence_model: Any) -> None:
    """Patch what TorchRec's tests and their helpers import.

    Args:
        test_sequence_model: their module with sequences.
    """
    replace_class(test_sequence_model, "TestEmbeddingCollectionSharder", _sequences)
    for name in ("get_default_sharders", "get_module_to_default_sharders"):
        setattr(sharding_plan, name, _defaults(name))
    for name in ("table_wise", "row_wise", "column_wise"):
        setattr(sharding_plan, name, _with_dynamic_kernel(getattr(sharding_plan, name)))
    model_parallel.get_default_sharders = sharding_plan.get_default_sharders
    model_parallel.EmbeddingShardingPlanner = planner
    whole_model = model_parallel.DistributedModelParallel
    whole_model.state_dict = _remembered(whole_model.state_dict)
    whole_model.__init__ = _counted(whole_model.__init__)
    # TorchRec's own runs on GPUs alone
    train_pipeline.train_pipelines.PrefetchTrainPipelineSparseDist = PrefetchTrainPipeline


def patch_helpers(test_sharding: Any, test_model_parallel: Any, base: Any) -> None:
    """Patch TorchRec's modules of these names; ``base`` is ``test_model_parallel_base``."""
    test_sharding.EmbeddingShardingPlanner = planner
    shared = test_model_parallel.ModelParallelTestShared
    shared._test_sharding = _without_static_vbe(shared._test_sharding)
    test_model_parallel.EmbeddingBagCollectionSharder = DynamicDefaultBags
    base.EmbeddingShardingPlanner = planner


def replace_class(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a class of a module by what ``make`` returns; its objects can still be pickled."""
    stock = getattr(module, name)
    stock.__qualname__ = f"Stock{name}"
    setattr(module, stock.__qualname__, stock)
    setattr(module, name, make(stock))


def planner(
    topology: Any = None, constraints: Mapping[str, Any] | None = None, **more: Any
) -> DynamicEmbeddingShardingPlanner:
    """Return the planner of dynamic tables in place of TorchRec's, with its arguments."""
    # a test that names kernels means those of static tables
    kept = {
        name: dataclasses.replace(given, compute_kernels=None)
        for name, given in (constraints or {}).items()
    }
    return DynamicEmbeddingShardingPlanner(topology=topology, constraints=kept or None, **more)


def bags(stock: Callable[..., Any]) -> Callable[..., Any]:
    def created(
        sharding_type: str,
        kernel_type: str,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> Any:
        if sharding_type == _DATA_PARALLEL:
            return stock(sharding_type, kernel_type, fused_params, qcomm_codecs_registry)
        kept = {k: of for k, of in (fused_params or {}).items() if not k.startswith("cache_")}
        return DynamicBags(sharding_type, kept, qcomm_codecs_registry)

    return created


def _sequences(stock: Callable[..., Any]) -> Callable[..., Any]:
    def created(
        sharding_type: str,
        kernel_type: str,
        qcomms_config: Any = None,
        fused_params: dict[str, Any] | None = None,
        use_index_dedup: bool = False,
    ) -> Any:
        if sharding_type == _DATA_PARALLEL:
            return stock(sharding_type, kernel_type, qcomms_config, fused_params, use_index_dedup)
        codecs = {} if qcomms_config is None else get_qcomm_codecs_registry(qcomms_config)
        fused_params = {"learning_rate": 0.1, **(fused_params or {})}
        return DynamicSequences(sharding_type, fused_params, codecs, use_index_dedup)

    return created


def _defaults(name: str) -> Callable[[], Any]:
    """Return TorchRec's function with sharders of dynamic tables in place of its own."""
    stock = sharding_plan.get_default_sharders
    dynamic = {EmbeddingBagCollectionSharder: DynamicDefaultBags}
    dynamic[EmbeddingCollectionSharder] = lambda: DynamicEmbeddingCollectionSharder(
        tables="all", options=OPTIONS
    )

    def sharders() -> list[ModuleSharder[nn.Module]]:
        return [dynamic.get(type(of), lambda of=of: of)() for of in stock()]

    def by_module() -> dict[type[nn.Module], ModuleSharder[nn.Module]]:
        return {of.module_type: of for of in sharders()}

    return sharders if name == "get_default_sharders" else by_module


def _with_dynamic_kernel(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of plans that names the kernel of dynamic tables."""

    def planned(*given: Any, **named: Any) -> Any:
        return stock(*given, **{"compute_kernel": DYNAMIC_KERNEL, **named})

    return planned


def _remembered(state_dict: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a method for state dicts that know their model."""

    def of_model(self: nn.Module, *given: Any, **named: Any) -> dict[str, Any]:
        with dense_only() if _in_groups(self) else nullcontext():
            entries = state_dict(self, *given, **named)
        entries.model = self  # type: ignore[attr-defined]
        return entries

    return of_model


def _in_groups(model: nn.Module) -> bool:
    """Return whether several groups of ranks have the tables, which refuses a state dict."""
    return isinstance(model, DynamicDMPCollection)


def _counted(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of models that writes the number of dynamic tables into a file."""

    def constructed(self: nn.Module, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        parts = [of for of in self.modules() if isinstance(of, DynamicPart)]
        with open(os.environ["TORCHREC_COUNTS"], "a") as counts:
            counts.write(f"{sum(len(of.plan_of_tables.options) for of in parts)}\n")

    return constructed


def loads_rows(copy: Callable[..., None]) -> Callable[..., None]:
    """Return a copy of state dicts that loads weights of static tables into dynamic ones."""

    def copied(
        loc: dict[str, Any], glob: Mapping[str, Tensor], exclude_predfix: Any = None
    ) -> None:
        tables = tuple(f"{name.removesuffix(_LAYOUT)}." for name in loc if name.endswith(_LAYOUT))
        model = getattr(loc, "model", None)
        if model is not None and _in_groups(model):
            insert_static_rows(model, glob)
        elif tables:
            # the weight alone of a static table: its rows become those of ids 0, 1, ...
            of_tables = {name: of for name, of in glob.items() if name.startswith(tables)}
            model.load_state_dict(of_tables, strict=False)
        rest = {name: of for name, of in loc.items() if not name.startswith(tables)}
        copy(rest, glob, exclude_predfix)

    return copied


def _without_static_vbe(run: Callable[..., None]) -> Callable[..., None]:
    """Leave out examples that FBGEMM's kernels cannot run on a CPU."""

    def in_its_place(self: Any, sharders: list[Any], *given: Any, **named: Any) -> None:
        types = [getattr(of, "_sharding_type", None) for of in sharders]
        assume(not (named.get("variable_batch_per_feature") and _DATA_PARALLEL in types))
        run(self, sharders, *given, **named)

    return in_its_place
