"""Every class of torch_dynemb.errors is raised, is the built-in of its kind, and says where."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from held_disk import full, held_disk
from ranks import Ranks
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, Dataset

import torch_dynemb as td
from torch_dynemb import checkpoint, delta_log, errors, serving
from torch_dynemb._library.typed_errors import is_marked, typed_error
from torch_dynemb.distributed.together import ranks_of

pytestmark = pytest.mark.cpu_only("files, forks and a process group")

ADS = "ads"
IDS = torch.arange(8)
SEGMENT = 1 << 16  # bytes of a file of rows


def table(**options: Any) -> td.DynamicEmbedding:
    return td.DynamicEmbedding(16, name=ADS, optimizer=td.SGD(lr=0.1), **options)


def trained(**options: Any) -> td.DynamicEmbedding:
    module = table(**options)
    module(IDS).sum().backward()
    module.optimizer.step()
    return module


def stored(path: Path, **options: Any) -> td.DynamicEmbedding:
    return trained(storage=td.SSDStore(path, cache="64 rows", segment=SEGMENT, **options))


def written(folder: Path, pattern: str) -> Path:
    return next(iter(sorted(folder.rglob(pattern))))


# -- how each of them comes about ----------------------------------------------------------------


def full_table(folder: Path) -> None:
    trained(policy=td.Policy(capacity=4, on_full="error"))


def full_table_of_a_checkpoint(folder: Path) -> None:
    checkpoint.save(folder / "c", trained())
    checkpoint.load(folder / "c", table(max_rows=4))


def no_addresses(folder: Path) -> None:
    td.ops.reserve([1 << 45], torch.float32)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def no_room_for_a_file(folder: Path) -> None:
    model = trained()
    with largest_file(100):
        checkpoint.save(folder / "c", model)


def full_store(folder: Path) -> None:
    storage = td.SSDStore(folder, cache="50%", segment=SEGMENT, disk=4 * SEGMENT)
    model = table(storage=storage, max_rows=1 << 14)
    for begin in range(0, 1 << 14, 256):
        model(torch.arange(begin, begin + 256)).sum().backward()
        model.optimizer.step()


def no_headroom(folder: Path) -> None:
    live = serving.live(trained(), headroom=2)
    live.frozen_tables.update(ADS, torch.arange(100, 103), torch.zeros(3, 16))


def damaged_file(folder: Path) -> None:
    checkpoint.save(folder / "c", trained())
    rows = written(folder / "c", "*.safetensors")
    data = bytearray(rows.read_bytes())
    data[-1] ^= 1
    rows.write_bytes(data)
    checkpoint.load(folder / "c", table())


def damaged_snapshot(folder: Path) -> None:
    model = stored(folder)
    checkpoint.save_snapshot(model, "a")
    written(folder / "snapshots", "a").write_text("{}")
    checkpoint.load_snapshot(model)


def other_version(folder: Path) -> None:
    checkpoint.save(folder / "c", trained())
    manifest = folder / "c" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 99}))
    checkpoint.load(folder / "c", table())


def unknown_base(folder: Path) -> None:
    model = trained()
    checkpoint.save(folder / "c", model)
    checkpoint.save(folder / "d", model, since=folder / "c")


def increments_with_a_gap(folder: Path) -> None:
    model = trained()
    checkpoint.record_changes(model)
    for before, after in ((None, "a"), ("a", "b"), ("b", "c")):
        since = None if before is None else folder / before
        checkpoint.save(folder / after, model, since=since)
    checkpoint.merge([folder / "a", folder / "c"], folder / "whole")


def second_log(folder: Path) -> None:
    with delta_log.DeltaLog(folder / "log") as log:
        log.attach(trained())
        delta_log.DeltaLog(folder / "log").attach(trained())


def second_store(folder: Path) -> None:
    first = stored(folder)
    stored(folder)
    assert len(first) == IDS.numel()


def in_a_fork(folder: Path) -> None:
    """Raises here what a forked child has raised and sent."""
    module = trained()
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            module(IDS).sum().backward()
        except BaseException as error:
            os.write(send, pickle.dumps(error))
        os._exit(0)
    os.close(send)
    os.waitpid(pid, 0)
    with os.fdopen(receive, "rb") as pipe:
        raise pickle.loads(pipe.read())


def on_every_rank(folder: Path) -> None:
    module = trained()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        module(IDS + 8)
    finally:
        dist.destroy_process_group()


def replaced_while_read(folder: Path) -> None:
    checkpoint.save(folder / "c", trained())
    with checkpoint.open(folder / "c") as saved:
        other = trained()
        other(IDS).sum().backward()
        checkpoint.save(folder / "c", other)
        saved.verify()


def failed_in_the_background(folder: Path) -> None:
    model = trained()
    with pytest.MonkeyPatch.context() as monkeypatch, held_disk(monkeypatch) as disk:
        handle = checkpoint.save(folder / "c", model, asynchronous=True)
        disk.let_go(full())
        assert handle._ended.wait(60)
        model.optimizer.step()


class Case(NamedTuple):
    """How an error comes about, its class, what built-in it is, and what it is about."""

    act: Callable[[Path], None]
    kind: type[errors.DynembError]
    built_in: type[Exception]
    tables: tuple[str, ...] = ()
    path: str | None = None


CASES = (
    Case(full_table, errors.NoRoomError, RuntimeError, (ADS,)),
    Case(full_table_of_a_checkpoint, errors.NoRoomError, RuntimeError, (ADS,)),
    Case(no_addresses, errors.HostMemoryError, MemoryError),
    Case(no_room_for_a_file, errors.DiskFullError, OSError, (), "c.tmp-*/*/*/*.safetensors"),
    Case(full_store, errors.DiskFullError, RuntimeError, (ADS,)),
    Case(no_headroom, errors.NoHeadroomError, RuntimeError, (ADS,)),
    Case(damaged_file, errors.DamagedFileError, ValueError, (), "c/*/*/*.safetensors"),
    Case(damaged_snapshot, errors.DamagedStoreError, RuntimeError, (), "snapshots/a"),
    Case(other_version, errors.UnsupportedFormatError, ValueError, (), "c/manifest.json"),
    Case(unknown_base, errors.NewBaseNeededError, RuntimeError, (ADS,), "c"),
    Case(increments_with_a_gap, errors.NewBaseNeededError, ValueError, (), "c"),
    Case(second_log, errors.InUseError, RuntimeError, (), "log/*"),
    Case(second_store, errors.InUseError, RuntimeError),
    Case(in_a_fork, errors.ForkedProcessError, RuntimeError),
    Case(on_every_rank, errors.ReplicatedTableError, RuntimeError, (ADS,)),
    Case(replaced_while_read, errors.ReplacedError, RuntimeError, (), "c"),
    Case(failed_in_the_background, errors.BackgroundError, RuntimeError, (ADS,)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.act.__name__)
def test_errors_have_a_class_and_say_where(case: Case, tmp_path: Path) -> None:
    with pytest.raises(case.built_in) as raised:
        case.act(tmp_path)
    error = raised.value
    assert type(error) is case.kind
    assert error.tables == case.tables
    if case.path is None:
        assert error.path is None
    else:
        assert error.path is not None
        assert error.path.relative_to(tmp_path).match(case.path)
    sent = pickle.loads(pickle.dumps(error))
    assert (type(sent), str(sent), vars(sent)) == (type(error), str(error), vars(error))


def test_every_class_has_a_case() -> None:
    """A GPU's memory runs out in tests/cuda/test_cuda_memory.py."""
    classes = {getattr(errors, name) for name in errors.__all__}
    raised = {case.kind for case in CASES}
    assert classes == raised | {errors.DynembError, errors.DeviceMemoryError}


def test_errors_keep_numbers() -> None:
    with pytest.raises(errors.NoHeadroomError) as raised:
        no_headroom(Path())
    sent = pickle.loads(pickle.dumps(raised.value))
    assert (sent.table, sent.wanted, sent.free) == (ADS, 3, 2)
    disk = pickle.loads(pickle.dumps(errors.DiskFullError(28, "No space left on device", "/c/d")))
    assert (disk.errno, disk.filename, disk.path) == (28, "/c/d", Path("/c/d"))
    assert str(disk) == "[Errno 28] No space left on device: '/c/d'"


# -- marks of the compiled library ---------------------------------------------------------------


def test_a_mark_at_the_end_of_a_message_names_the_class() -> None:
    text = "dynemb::f: out of GPU memory [DeviceMemoryError] (csrc/cuda/memory/a.cu:1)\nmore"
    assert is_marked(RuntimeError(text))
    error = typed_error(RuntimeError(text))
    assert type(error) is errors.DeviceMemoryError
    assert isinstance(error, torch.OutOfMemoryError)
    assert str(error) == "dynemb::f: out of GPU memory (csrc/cuda/memory/a.cu:1)\nmore"


@pytest.mark.parametrize(
    "text", ["plain", "a [NoRoomError] in the middle", "[NoRoomError]: at the beginning", ""]
)
def test_errors_without_a_mark_stay_what_they_are(text: str) -> None:
    assert not is_marked(RuntimeError(text))


def test_marks_name_classes() -> None:
    header = Path(__file__).parents[2] / "csrc/core/runtime/error_class.h"
    marks = re.findall(r'k(\w+) = " \[(\w+)\]"', header.read_text())
    assert len(marks) > 5
    for constant, mark in marks:
        assert constant == mark
        assert issubclass(getattr(errors, mark), RuntimeError)


def test_compiled_code_raises_the_mark() -> None:
    full_module = table(policy=td.Policy(capacity=4, on_full="error"))
    lookup = torch.compile(full_module, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"has 0 ids and room for 4 .*\[NoRoomError\] \(csrc/"):
        lookup(IDS)


# -- other processes -------------------------------------------------------------------------------


def told_of(rank: int) -> tuple[str, int, int]:
    """What a rank catches when the second one has no headroom."""

    def work() -> None:
        if rank == 1:
            raise errors.NoHeadroomError("no headroom", table=ADS, wanted=3, free=2)

    try:
        ranks_of(None).run(work)
    except errors.NoHeadroomError as error:
        return error.table, error.wanted, error.free
    return "", 0, 0


def test_all_ranks_raise_the_class_of_one(two_ranks: Ranks) -> None:
    assert two_ranks.run(told_of) == [(ADS, 3, 2)] * 2


class Served(Dataset[torch.Tensor]):
    """Raises in the worker of a DataLoader."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        no_headroom(Path())
        return torch.zeros(1)


def test_workers_of_a_data_loader_keep_the_class() -> None:
    loader = DataLoader(Served(), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(errors.NoHeadroomError, match="need 3"):
        list(loader)
