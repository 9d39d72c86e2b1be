"""Read-only tables with rows in files, against nn.EmbeddingBag, and what a file may suffer."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_packages import QUICK
from torch import Tensor, nn
from torch._inductor import config

import torch_dynemb as td
from torch_dynemb import ops, serving
from torch_dynemb.errors import DamagedFileError, DamagedStoreError, DiskFullError

pytestmark = pytest.mark.cpu_only("the CPU reads files")

DIM, IDS, PAGE = 24, 3000, 4096
PER_PAGE = PAGE // (4 * DIM + 4)


class Model:
    """Rows of a dynamic table and of an nn.EmbeddingBag, and a copy of the first in a file."""

    def __init__(self, folder: Path, **storage: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(-(2**62), 2**62, (IDS,), generator=generator)
        self.weights = torch.randn(IDS, DIM, generator=generator)
        self.bag = td.DynamicEmbeddingBag(
            DIM, mode="mean", name="ads", optimizer=td.SGD(lr=0.1), initializer=td.Constant(0.5)
        )
        self.bag.group.insert_or_assign("ads", self.ids, self.weights)
        self.folder = folder / "rows"
        options = {"cache": "320 rows", **storage}
        self.frozen = td.freeze(self.bag, storage=td.SSDStore(self.folder, **options))
        (self.file,) = self.folder.iterdir()

    def expected(self, numbers: Tensor) -> Tensor:
        return nn.functional.embedding_bag(numbers, self.weights, mode="mean")

    def place_of(self, number: int) -> int:
        """Offset of a row in the file, by its values."""
        return self.file.read_bytes().index(self.weights[number].numpy().tobytes())


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, IDS, shape, generator=torch.Generator().manual_seed(seed))


def crc32c(data: bytes) -> int:
    """By the polynomial of RFC 3720, bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


@pytest.mark.parametrize("io", ["auto", "threads"])
def test_rows_come_from_a_small_cache_and_the_file(tmp_path: Path, io: str) -> None:
    model = Model(tmp_path, io=io)
    for seed in range(4):
        asked = numbers(300, 5, seed=seed)
        assert torch.allclose(model.frozen(model.ids[asked]), model.expected(asked))
    stats = model.frozen.frozen_tables.stats()
    assert stats.cached_rows == 320
    assert stats.hits + stats.misses == 4 * 1500
    assert 1500 < stats.misses < 6000
    assert stats.bytes_read == stats.reads * PAGE
    assert stats.reads <= 4 * -(-IDS // PER_PAGE)  # rows of a page are read together
    absent = torch.tensor([[5, 6]])
    assert torch.equal(model.frozen(absent), torch.full((1, DIM), 0.5))


def test_a_cache_of_all_rows_reads_each_row_once(tmp_path: Path) -> None:
    model = Model(tmp_path, cache=1.0)
    for _ in range(2):
        model.frozen(model.ids[:, None])
    stats = model.frozen.frozen_tables.stats()
    assert (stats.hits, stats.misses) == (IDS, IDS)


def test_popular_rows_stay(tmp_path: Path) -> None:
    model = Model(tmp_path)
    popular = model.ids[:100, None]
    for seed in range(20):
        model.frozen(popular)
        model.frozen(popular)
        model.frozen(model.ids[numbers(200, 1, seed=seed)])
    before = model.frozen.frozen_tables.stats().hits
    model.frozen(popular)
    assert model.frozen.frozen_tables.stats().hits - before >= 95


def test_the_layout_of_a_file(model: Model) -> None:
    data = model.file.read_bytes()
    header = struct.unpack("<8q", data[:64])
    assert header[0].to_bytes(8, "little") == b"rowfile1"
    assert header[3:5] == (len(data), 1)
    of_table = struct.unpack("<7q", data[64:120])
    _, buckets, dim, storage, begin, rows, size = of_table
    assert (dim, storage, rows, size) == (DIM, 0, IDS, IDS)
    assert struct.unpack("<q", data[128:136])[0] == crc32c(data[:128])
    index = struct.iter_unpack("<8q", data[header[5] : header[5] + 64 * buckets])
    slots = [slot for line in index for slot in zip(line[:4], line[4:], strict=True)]
    place = {key: stored - 1 for key, stored in slots if stored}
    assert sorted(place) == sorted(model.ids.tolist())
    for number in (0, 7, IDS - 1):
        id_ = int(model.ids[number])
        page, slot = divmod(place[id_], PER_PAGE)
        at = begin + page * PAGE + slot * (4 * DIM + 4)
        row = model.weights[number].numpy().tobytes()
        sum_ = crc32c(data[8:24] + struct.pack("<q", id_) + row)
        assert data[at : at + 4 * DIM + 4] == row + struct.pack("<I", sum_)
    first_block = data[header[5] : header[5] + min(1 << 16, 64 * buckets)]
    assert struct.unpack("<I", data[header[7] : header[7] + 4])[0] == crc32c(first_block)


def test_threads_share_the_cache(model: Model) -> None:
    wrong: list[int] = []

    def read(seed: int) -> None:
        for step in range(20):
            asked = numbers(200, 3, seed=100 * seed + step)
            if not torch.allclose(model.frozen(model.ids[asked]), model.expected(asked)):
                wrong.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- copies --------------------------------------------------------------------------------------


def open_files(path: Path) -> int:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(of) and os.path.samefile(of, path) for of in links)


def test_the_file_is_open_once_until_its_last_copy_has_gone(model: Model) -> None:
    asked = numbers(10, 2)
    copies = [copy.deepcopy(model.frozen), pickle.loads(pickle.dumps(model.frozen))]
    assert open_files(model.file) == 1
    del model.frozen
    gc.collect()
    for of in copies:
        assert torch.allclose(of(model.ids[asked]), model.expected(asked))
    copies.clear()
    del of
    gc.collect()
    assert open_files(model.file) == 0


def test_exported_programs_use_the_file(model: Model) -> None:
    asked = numbers(10, 2)
    program = torch.export.export(model.frozen, (model.ids[asked],)).module()
    assert torch.allclose(program(model.ids[asked]), model.expected(asked))


def test_lookups_alone_leave_few_files_open(tmp_path: Path) -> None:
    programs = []  # which have copies of the buffers alone
    for number in range(7):
        (tmp_path / str(number)).mkdir()
        model = Model(tmp_path / str(number))
        tables = model.frozen.frozen_tables
        names = ("file", "tables", "meta", "init_data")
        programs.append([tables.get_buffer(name).clone() for name in names])
    ids, weights = model.ids[:2], model.weights[:2]  # those of each
    del model, tables
    gc.collect()
    batch = ops.LookupBatch.of_rows(ids, ids[:0], [0], DIM)
    opened = []
    for program in programs:
        assert torch.equal(ops.file_lookup(*program, batch).output, weights)
        opened.append(sum(open_files(of / "rows" / "tables0.rows") for of in tmp_path.iterdir()))
    assert opened == [1, 2, 3, 4, 4, 4, 4]


def test_state_of_another_copy_brings_its_file(model: Model, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Model(tmp_path / "other")
    other.frozen.load_state_dict(model.frozen.state_dict())
    assert torch.equal(other.frozen(model.ids[:5, None]), model.weights[:5])
    state = model.frozen.state_dict()
    model.file.unlink()
    del model.frozen, other.frozen
    gc.collect()
    with pytest.raises(RuntimeError, match=r"cannot open .*tables0\.rows"):
        td.freeze(model.bag, storage=td.SSDStore(tmp_path / "third")).load_state_dict(state)


def test_a_state_that_does_not_fit_changes_nothing(model: Model, tmp_path: Path) -> None:
    wider = td.DynamicEmbeddingBag(8, mode="sum", optimizer=td.SGD(lr=0.1))
    wider(torch.arange(3)[:, None])
    other = td.freeze(wider, storage=td.SSDStore(tmp_path / "other")).state_dict()
    own = model.frozen.state_dict()
    for state in (other, {name: of for name, of in other.items() if name.endswith("file")}):
        with pytest.raises(RuntimeError, match=r"other tables or dims|Missing key"):
            model.frozen.load_state_dict(state)
    mixed = {**own, "frozen_tables.file": other["frozen_tables.file"]}
    with pytest.raises(RuntimeError, match=r"has 3000 ids, but that of .* has 3"):
        model.frozen.load_state_dict(mixed)
    assert torch.equal(model.frozen(model.ids[:9, None]), model.weights[:9])


def test_copies_that_are_written_into_one_folder_at_once(model: Model, tmp_path: Path) -> None:
    storage, said = td.SSDStore(tmp_path / "one"), []

    def write() -> None:
        try:
            said.append(td.freeze(model.bag, storage=storage))
        except FileExistsError as error:
            said.append(str(error))

    for _ in range(5):
        threads = [threading.Thread(target=write) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (frozen,) = [of for of in said if not isinstance(of, str)]
    assert all("give a folder of its own" in of for of in said if isinstance(of, str))
    assert torch.equal(frozen(model.ids[:9, None]), model.weights[:9])


# -- damage --------------------------------------------------------------------------------------


def change(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_damaged_row_is_named_and_the_others_are_read(model: Model) -> None:
    change(model.file, model.place_of(7) + 5)
    id_ = int(model.ids[7])
    with pytest.raises(
        DamagedStoreError, match=rf"row of id {id_} in table 'ads', at offset \d+ of"
    ):
        model.frozen(model.ids[:, None])
    assert torch.equal(model.frozen(model.ids[8:, None]), model.weights[8:])
    with pytest.raises(DamagedStoreError, match="copy the file or the package again, or write it"):
        model.frozen(model.ids[7:8, None])


def test_a_file_that_is_cut_short_while_it_is_open(model: Model) -> None:
    os.truncate(model.file, PAGE)
    with pytest.raises(DamagedStoreError, match=rf"has {PAGE} bytes, expected \d+; it was cut"):
        model.frozen(model.ids[:1, None])
    with pytest.raises(DamagedStoreError, match="it was cut short while it was open: copy"):
        model.frozen.frozen_tables.ids("ads")


def test_a_row_at_the_place_of_another_is_none(model: Model) -> None:
    data = bytearray(model.file.read_bytes())
    here, there, size = model.place_of(1), model.place_of(2), 4 * DIM + 4
    data[here : here + size], data[there : there + size] = (
        data[there : there + size],
        data[here : here + size],
    )
    model.file.write_bytes(data)
    for number in (1, 2):
        with pytest.raises(DamagedStoreError, match=f"row of id {int(model.ids[number])} "):
            model.frozen(model.ids[number : number + 1, None])


def reopened(model: Model) -> nn.Module:
    """Open the file again, as another process would."""
    state = pickle.dumps(model.frozen)
    del model.frozen
    gc.collect()
    return pickle.loads(state)  # type: ignore[no-any-return]


def test_a_damaged_index_is_found_at_its_first_use(model: Model) -> None:
    (index,) = struct.unpack("<q", model.file.read_bytes()[40:48])
    change(model.file, index + 70)
    frozen = reopened(model)
    with pytest.raises(DamagedStoreError, match=r"block 0 of the index, at .* wrong checksum"):
        frozen(model.ids[:, None])
    with pytest.raises(DamagedStoreError, match="block 0 of the index"):
        frozen.frozen_tables.ids("ads")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: change(file, 0), "does not begin as a file of rows"),
        (lambda file: change(file, 80), "the checksum of its header is wrong"),
        (lambda file: os.truncate(file, file.stat().st_size - 1), r"has \d+ bytes, expected \d+"),
        (lambda file: os.truncate(file, 100), "has 100 bytes, too few for rows"),
        (lambda file: os.truncate(file, 0), "has 0 bytes, too few for rows"),
    ],
)
def test_a_damaged_file_is_not_opened(model: Model, damage: Any, message: str) -> None:
    damage(model.file)
    with pytest.raises(DamagedStoreError, match=message):
        reopened(model)


def test_a_file_of_another_model_is_not_opened(model: Model, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Model(tmp_path / "other")
    shutil.copy(other.file, model.file)
    with pytest.raises(DamagedStoreError, match="has the rows of another model"):
        reopened(model)


def test_a_forked_process_opens_the_file_for_itself(model: Model) -> None:
    model.frozen(model.ids[:2, None])
    child = os.fork()
    if child == 0:
        try:
            right = torch.equal(model.frozen(model.ids[:9, None]), model.weights[:9])
            del model.frozen
            gc.collect()
            os._exit(0 if right and open_files(model.file) == 0 else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(model.frozen(model.ids[:9, None]), model.weights[:9])


# -- arguments -----------------------------------------------------------------------------------


def test_wrong_storage(model: Model, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"storage is .*HostStore.*, expected a torch_dynemb\.SSD"):
        td.freeze(model.bag, storage=td.HostStore())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="storage has device_cache='1GB', but the CPU serves"):
        td.freeze(model.bag, storage=td.SSDStore(tmp_path / "x", device_cache="1GB"))
    with pytest.raises(ValueError, match="storage is given, but the model is frozen already"):
        td.freeze(td.freeze(model.bag), storage=td.SSDStore(tmp_path / "x"))
    with pytest.raises(FileExistsError, match="is not empty: give a folder of its own"):
        td.freeze(model.bag, storage=td.SSDStore(model.folder))
    with pytest.raises(RuntimeError, match="cannot go to meta: the CPU reads the files"):
        model.frozen.to("meta")
    with pytest.raises(TypeError, match="has its rows in a file or in Redis, of which a search"):
        td.top_k(torch.ones(1, DIM), model.frozen, k=2)
    with pytest.raises(ValueError, match="rows is 'int8', but the model has FileTables, with rows"):
        td.freeze(model.frozen, rows="int8")
    with pytest.raises(ValueError, match="the model is frozen already, without scores"):
        td.freeze(model.frozen, keep=td.Top(3, by="step"))
    assert not (tmp_path / "x").exists()


def test_a_full_disk_leaves_nothing(model: Model, tmp_path: Path) -> None:
    storage = td.SSDStore(tmp_path / "full", disk="128KiB", segment="16KiB")
    with pytest.raises(DiskFullError, match="takes more than the 131072 bytes that disk= "):
        td.freeze(model.bag, storage=storage)
    assert not (tmp_path / "full").exists()
    (tmp_path / "full").mkdir()  # a folder of the user stays
    with pytest.raises(ValueError, match=r"keep .*nothing"):
        td.freeze(
            model.bag,
            keep={"nothing": td.Top(3, by="step")},
            storage=td.SSDStore(tmp_path / "full"),
        )
    assert [*(tmp_path / "full").iterdir()] == []
    (tmp_path / "full").rmdir()
    model.weights[9, 0] = float("nan")
    model.bag.group.insert_or_assign("ads", model.ids, model.weights)
    with pytest.raises(
        ValueError, match=f"1 rows of table 'ads', such as that of id {model.ids[9]}"
    ):
        td.freeze(model.bag, rows="int8", storage=td.SSDStore(tmp_path / "full"))
    assert not (tmp_path / "full").exists()


def test_names_of_files() -> None:
    with pytest.raises(RuntimeError, match="file does not name a file of rows"):
        ops.file_open(torch.zeros(519, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"packed\.size\(0\) is 2, expected 3"):
        ops.file_pages(torch.arange(3), torch.zeros(2, 8, dtype=torch.uint8), 0)


# -- packages ------------------------------------------------------------------------------------


@pytest.mark.long
def test_packages_with_files(model: Model, tmp_path: Path) -> None:
    from tutorials.serving.metrics import Metrics

    asked = numbers(10, 2)
    with config.patch(QUICK):
        path = serving.export(model.frozen, tmp_path / "package", (model.ids[asked],))
        in_memory = serving.export(model.bag.eval(), tmp_path / "memory", (model.ids[asked],))
    assert os.path.samefile(path / "tables0.rows", model.file)  # on the disk once
    del model.frozen
    gc.collect()
    shutil.rmtree(model.folder)
    path = path.rename(tmp_path / "moved")
    with serving.load(path, cache="64 rows") as served:
        assert torch.allclose(served.run(model.ids[asked]), model.expected(asked))
        (stats,) = served.row_files().values()
        assert (stats.cached_rows, stats.misses) == (64, 20)
        page = Metrics(served, None, None).text().decode()
    assert 'dynemb_rows_read_total{file="tables0.rows",from="file"} 20.0' in page
    with pytest.raises(ValueError, match=r"cache is '1GB', but .*memory has its rows in memory"):
        serving.load(in_memory, cache="1GB")
    file = path / "tables0.rows"
    whole = file.read_bytes()
    row = whole.index(model.weights[int(asked[0, 0])].numpy().tobytes())
    change(file, row)
    with (
        serving.load(path) as served,
        pytest.raises(DamagedStoreError, match=f"the row of id {int(model.ids[asked[0, 0]])} "),
    ):
        served.run(model.ids[asked])
    file.write_bytes(whole[:-5])
    with pytest.raises(DamagedStoreError, match="it was cut short"):
        serving.load(path)
    file.unlink()
    with pytest.raises(DamagedFileError, match=r"tables0\.rows: the file is missing"):
        serving.load(path)
