"""What TorchRec's own tests run on: CPUs and gloo, with static or dynamic tables.

`install` patches names in the modules that configure these tests, and no test: the sharders, the
planner, backend and device, and how a sharded model gets the weights of the unsharded one. Every
process of a test calls it before it imports the test.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchrec.distributed
import torchrec.test_utils
from hypothesis import HealthCheck, Phase, assume, settings
from torch import Tensor, nn
from torchrec.distributed import model_parallel, sharding_plan, train_pipeline
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import get_qcomm_codecs_registry
from torchrec.distributed.types import ModuleSharder, ShardingType

from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    DynamicEmbeddingShardingPlanner,
    PrefetchTrainPipeline,
    TableOptions,
)
from torch_dynemb.torchrec.collections.dynamic_part import DynamicPart
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
from uneven_gather import uneven_gather  # noqa: E402

STATIC, DYNAMIC = "static", "dynamic"
GPUS = 8  # that the conditions of tests see, which then run on as many processes
WAITS = timedelta(seconds=100)  # for a rank that has failed
_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value  # refused for dynamic tables
_patches = ExitStack()  # to the end of the process
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


def install(folder: Path, tables: str) -> None:
    """Patch TorchRec's configuration of its tests in this process.

    Args:
        folder: with the files ``torchrec/distributed/tests/*.py`` of TorchRec.
        tables: ``"static"`` or ``"dynamic"``.
    """
    parts = folder / "torchrec" / "distributed"
    if str(parts) in torchrec.distributed.__path__:
        return  # a process that has forked from one with the patches
    torch.set_num_threads(1)
    # the same examples for static and dynamic tables; shrinking would run failing ones for hours
    settings.register_profile(
        "torchrec",
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        # classes that inherit a test; tests that leave most examples out
        suppress_health_check=[HealthCheck.differing_executors, HealthCheck.filter_too_much],
    )
    settings.load_profile("torchrec")
    torchrec.distributed.__path__.append(str(parts))
    train_pipeline.__path__.append(str(parts / "train_pipeline"))
    with many_gpus():
        _patch_tests(tables == DYNAMIC)
    if (parts / "train_pipeline" / "tests").exists():
        from torchrec.distributed.train_pipeline.tests import test_train_pipelines_base

        base = test_train_pipelines_base.TrainPipelineSparseDistTestBase
        base.setUp = _with_cpu(base.setUp)


@contextmanager
def many_gpus() -> Iterator[None]:
    """Let conditions of tests pass that ask for a number of GPUs."""
    with mock.patch.object(torch.cuda, "device_count", return_value=GPUS):
        yield


def _patch_tests(dynamic: bool) -> None:
    from torchrec.distributed.tests import test_sequence_model

    if dynamic:
        _replace(test_sequence_model, "TestEmbeddingCollectionSharder", _dynamic_sequences)
        for name in ("get_default_sharders", "get_module_to_default_sharders"):
            setattr(sharding_plan, name, _defaults(name))
        for name in ("table_wise", "row_wise", "column_wise"):
            setattr(sharding_plan, name, _dynamic_kernel(getattr(sharding_plan, name)))
        model_parallel.get_default_sharders = sharding_plan.get_default_sharders
        whole_model = model_parallel.DistributedModelParallel
        whole_model.state_dict = _remembered(whole_model.state_dict)
        whole_model.__init__ = _counted(whole_model.__init__)
        model_parallel.EmbeddingShardingPlanner = planner
        # TorchRec's own runs on GPUs alone
        train_pipeline.train_pipelines.PrefetchTrainPipelineSparseDist = PrefetchTrainPipeline

    from torchrec.distributed.test_utils import emb_sharder

    _replace(emb_sharder, "TestEBCSharder", _dynamic_bags if dynamic else _on_cpu)

    from torchrec.distributed.test_utils import multi_process, test_sharding

    torchrec.test_utils.init_distributed_single_host = _gloo
    multi_process.init_distributed_single_host = _gloo
    _patches.enter_context(uneven_gather())  # as NCCL does, for row-wise static tables
    dist.distributed_c10d.default_pg_timeout = WAITS
    test_sharding.TestEBCSharder = emb_sharder.TestEBCSharder
    create = test_sharding.create_test_sharder
    test_sharding.create_test_sharder = create if dynamic else _on_cpu(create)
    mesh = test_sharding.create_device_mesh_for_2D
    test_sharding.create_device_mesh_for_2D = lambda *given, **named: _Mesh(mesh(*given, **named))
    test_sharding.DeviceMesh = _cpu_mesh
    test_sharding.DMPCollection = _groups_on_cpu()
    if dynamic:
        test_sharding.EmbeddingShardingPlanner = planner
        test_sharding.copy_state_dict = _loads_rows(test_sharding.copy_state_dict)

    # these import names that are patched above
    from torchrec.distributed.test_utils import test_model_parallel, test_model_parallel_base

    test_model_parallel.ModelParallelTestShared.setUp = _without_nccl(
        test_model_parallel.ModelParallelTestShared.setUp
    )
    if dynamic:
        shared = test_model_parallel.ModelParallelTestShared
        shared._test_sharding = _without_static_vbe(shared._test_sharding)
        test_model_parallel.EmbeddingBagCollectionSharder = DynamicDefaultBags
        test_model_parallel_base.EmbeddingShardingPlanner = planner


def _replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a class of a module; objects of the class can still be pickled."""
    stock = getattr(module, name)
    stock.__qualname__ = f"Stock{name}"
    setattr(module, stock.__qualname__, stock)
    setattr(module, name, make(stock))


# -- CPUs and gloo -------------------------------------------------------------------------------


def _gloo(rank: int, world_size: int, backend: str, local_size: int | None = None) -> Any:
    """Begin a process group; see TorchRec's function of this name."""
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size or world_size)
    os.environ["LOCAL_RANK"] = str(rank % local_size if local_size else rank)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=WAITS)
    return dist.group.WORLD


def _cpu_mesh(device_type: str, **more: Any) -> Any:
    return dist.DeviceMesh(device_type="cpu", **more)


class _Averages:
    """A process group with the mean over its ranks, which gloo lacks and tests ask for."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _Averages:
        for of in tensors:
            dist.all_reduce(of, group=self._group)
            of /= dist.get_world_size(self._group)
        return self

    def wait(self) -> None:
        """Nothing: the sums are there."""


class _Mesh:
    """A mesh of devices with such process groups."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def get_group(self, mesh_dim: str) -> _Averages:
        return _Averages(self._mesh.get_group(mesh_dim=mesh_dim))


def _groups_on_cpu() -> type[nn.Module]:
    """Return TorchRec's DMPCollection without its check of the device, and with sums by gloo."""
    source = inspect.getsource(model_parallel.DMPCollection)
    check = 'device.type == "cuda"'
    assert source.count(check) == 1, "DMPCollection checks its device in another way"
    names = dict(vars(model_parallel))
    exec(source.replace(check, 'device.type in ("cpu", "cuda")'), names)

    class GroupsOnCpu(names["DMPCollection"]):  # type: ignore[misc]
        def _allreduce_tensors(
            self, ctx: Any, tensors_dict: Mapping[Any, list[Tensor]], *_: Any
        ) -> None:
            mean = self._custom_all_reduce or _Averages(ctx.replica_pg).allreduce_coalesced
            for tensors in tensors_dict.values():
                mean(tensors)

    return GroupsOnCpu


def _without_nccl(set_up: Callable[..., None]) -> Callable[..., None]:
    def in_its_place(self: Any, backend: str = "nccl") -> None:
        set_up(self, backend="gloo")  # "nccl" would skip the test
        self.backend = backend  # tests ask for it, some of which skip row-wise types for gloo

    return in_its_place


def _with_cpu(set_up: Callable[[Any], None]) -> Callable[[Any], None]:
    def in_its_place(self: Any) -> None:
        set_up(self)
        self.device = torch.device("cpu")

    return in_its_place


def _on_cpu(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Give kernels in managed memory of GPUs their counterpart on CPUs.

    Args:
        stock: makes a sharder, given ``kernel_type``.
    """

    def created(*given: Any, **named: Any) -> Any:
        arguments = inspect.signature(stock).bind(*given, **named).arguments
        if arguments["kernel_type"].startswith("fused"):
            arguments["kernel_type"] = "fused"
        return stock(**arguments)

    return created


def _without_static_vbe(run: Callable[..., None]) -> Callable[..., None]:
    """Leave out examples that FBGEMM's kernels cannot run on a CPU."""

    def in_its_place(self: Any, sharders: list[Any], *given: Any, **named: Any) -> None:
        types = [getattr(of, "_sharding_type", None) for of in sharders]
        assume(not (named.get("variable_batch_per_feature") and _DATA_PARALLEL in types))
        run(self, sharders, *given, **named)

    return in_its_place


# -- dynamic tables ------------------------------------------------------------------------------


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


def _dynamic_bags(stock: Callable[..., Any]) -> Callable[..., Any]:
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


def _dynamic_sequences(stock: Callable[..., Any]) -> Callable[..., Any]:
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


def _dynamic_kernel(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of plans that names the kernel of dynamic tables."""

    def planned(*given: Any, **named: Any) -> Any:
        return stock(*given, **{"compute_kernel": DYNAMIC_KERNEL, **named})

    return planned


def _remembered(state_dict: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a method for state dicts that know their model."""

    def of_model(self: nn.Module, *given: Any, **named: Any) -> dict[str, Any]:
        entries = state_dict(self, *given, **named)
        entries.model = self  # type: ignore[attr-defined]
        return entries

    return of_model


def _counted(init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor of models that writes the number of dynamic tables into a file."""

    def constructed(self: nn.Module, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        parts = [of for of in self.modules() if isinstance(of, DynamicPart)]
        with open(os.environ["TORCHREC_COUNTS"], "a") as counts:
            counts.write(f"{sum(len(of.plan_of_tables.options) for of in parts)}\n")

    return constructed


def _loads_rows(copy: Callable[..., None]) -> Callable[..., None]:
    """Return a copy of state dicts that loads weights of static tables into dynamic ones."""

    def copied(
        loc: dict[str, Any], glob: Mapping[str, Tensor], exclude_predfix: Any = None
    ) -> None:
        tables = {name.removesuffix(_LAYOUT) for name in loc if name.endswith(_LAYOUT)}
        if tables:
            # the weight alone of a static table: its rows become those of ids 0, 1, ...
            of_tables = {k: of for k, of in glob.items() if k.rpartition(".")[0] in tables}
            loc.model.load_state_dict(of_tables, strict=False)  # type: ignore[attr-defined]
        rest = {name: of for name, of in loc.items() if name.rpartition(".")[0] not in tables}
        copy(rest, glob, exclude_predfix)

    return copied


def environment(folder: Path, tables: str, counts: Path) -> None:
    """Have processes that a test starts find this module and its arguments.

    Args:
        folder, tables: of `install`.
        counts: a file that gets the number of dynamic tables of each model.
    """
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCHREC_TESTS": str(folder),
        "TORCHREC_TABLES": tables,
        "TORCHREC_COUNTS": str(counts),
        "OMP_NUM_THREADS": "1",
    }


def install_as_parent() -> None:
    """Install what `environment` has named, in a process that a test has started."""
    install(Path(os.environ["TORCHREC_TESTS"]), os.environ["TORCHREC_TABLES"])
