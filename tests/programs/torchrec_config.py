"""What TorchRec's own tests run on: CPUs and gloo, with static or dynamic tables.

`install` patches names in the modules that configure these tests, and no test: the sharders, the
planner, backend and device, and how a sharded model gets the weights of the unsharded one. Every
process of a test calls it before it imports the test.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchrec.distributed
import torchrec.test_utils
from hypothesis import HealthCheck, Phase, settings
from torch import Tensor
from torchrec.distributed import train_pipeline
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingType

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))
import torchrec_dynamic  # noqa: E402
from uneven_gather import uneven_gather  # noqa: E402

STATIC, DYNAMIC = "static", "dynamic"
GPUS = 8  # that the conditions of tests see, which then run on as many processes
WAITS = timedelta(seconds=100)  # for a rank that has failed
_patches = ExitStack()  # to the end of the process


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
        torchrec_dynamic.patch_collections(test_sequence_model)
    else:
        name = "TestEmbeddingCollectionSharder"
        torchrec_dynamic.replace_class(test_sequence_model, name, _on_cpu)

    from torchrec.distributed.test_utils import emb_sharder

    sharder = torchrec_dynamic.bags if dynamic else _on_cpu
    torchrec_dynamic.replace_class(emb_sharder, "TestEBCSharder", sharder)

    from torchrec.distributed.test_utils import multi_process, test_sharding

    torchrec.test_utils.init_distributed_single_host = _gloo
    multi_process.init_distributed_single_host = _gloo
    dist.distributed_c10d.default_pg_timeout = WAITS
    _patches.enter_context(uneven_gather())  # as NCCL does, for row-wise static tables
    mesh = test_sharding.create_device_mesh_for_2D
    test_sharding.create_device_mesh_for_2D = lambda *given, **named: _Mesh(mesh(*given, **named))
    test_sharding.DeviceMesh = _cpu_mesh
    # TorchRec's own asserts a GPU; ours runs on CPUs, and does the same for static tables
    test_sharding.DMPCollection = torchrec_dynamic.DynamicDMPCollection
    test_sharding.TestEBCSharder = emb_sharder.TestEBCSharder
    # before the modules below, which import them
    if dynamic:
        copy = test_sharding.copy_state_dict
        test_sharding.copy_state_dict = torchrec_dynamic.loads_rows(copy)
    else:
        test_sharding.create_test_sharder = _on_cpu(test_sharding.create_test_sharder)

    from torchrec.distributed.test_utils import test_model_parallel, test_model_parallel_base

    shared = test_model_parallel.ModelParallelTestShared
    shared.setUp = _without_nccl(shared.setUp)
    if dynamic:
        helpers = (test_sharding, test_model_parallel, test_model_parallel_base)
        torchrec_dynamic.patch_helpers(*helpers)


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
    """Give shards the one kernel that TorchRec's planner accepts on CPUs.

    Args:
        stock: makes a sharder, given ``sharding_type`` and ``kernel_type``.
    """

    def created(*given: Any, **named: Any) -> Any:
        arguments = inspect.signature(stock).bind(*given, **named).arguments
        if arguments["sharding_type"] != ShardingType.DATA_PARALLEL.value:
            arguments["kernel_type"] = EmbeddingComputeKernel.FUSED.value
        return stock(**arguments)

    return created


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
