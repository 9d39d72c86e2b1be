"""Packages with rows that are updated while they serve: as live tables of the same model."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from altered_packages import with_manifest
from packaged import HEADROOM, VERSION, dynamic_shapes, features, small_model
from quick_packages import QUICK
from safetensors import safe_open
from torch import Tensor, nn
from torch._inductor import config

import torch_dynemb as td
from torch_dynemb import serving
from torch_dynemb.errors import DamagedFileError
from torch_dynemb.serving.packages import export as export_module
from torch_dynemb.serving.packages.manifest import TABLES, read_package_manifest

if TYPE_CHECKING:
    from conftest import Package

pytestmark = pytest.mark.cpu_only("the package is compiled for the CPU")

U, V = "bags.u", "bags.v"


@pytest.fixture
def served(live_package: Package) -> Iterator[serving.ServedModel]:
    """Loaded anew for each test, because tests change its rows."""
    with serving.load(live_package.path, runners=2) as model:
        yield model


@pytest.fixture
def live(live_package: Package) -> nn.Module:
    """The same model in Python, with live tables."""
    return serving.live(live_package.frozen, headroom=HEADROOM)


def tables_of(live: nn.Module) -> serving.LiveTables:
    (tables,) = serving.live_tables(live).values()
    return tables


def assert_same(served: serving.ServedModel, live: nn.Module, seed: int = 5) -> None:
    inputs = features(32, 400, seed)
    score, others = live(*inputs)
    found, found_others = served.run(*inputs)
    assert torch.equal(found, score)
    assert all(torch.equal(found_others[name], others[name]) for name in others)


def test_a_package_takes_updates_as_live_tables_do(
    served: serving.ServedModel, live: nn.Module
) -> None:
    assert_same(served, live)
    tables = tables_of(live)
    for step in range(12):  # enough ids to rehash the index
        ids = torch.arange(25 * step, 25 * step + 40)
        for name, dim in (("u", 8), ("v", 4)):
            rows = torch.randn(40, dim)
            erased = ids[:15] + 7
            assert served.apply(f"bags.{name}", ids, rows, erased=erased) == tables.update(
                name, ids, rows, erased=erased
            )
        assert served.erase(V, ids[20:30]) == tables.erase("v", ids[20:30]) == 10
        assert_same(served, live, step)
    stats = served.stats()
    assert {name: s.ids for name, s in stats.items()} == {
        f"bags.{name}": size for name, size in tables.sizes().items()
    }
    assert stats[U].free_rows == tables.free_rows()["u"]
    assert (stats[U].updates, stats[V].updates) == (12, 24)


def test_the_dense_version_is_that_of_the_export(served: serving.ServedModel) -> None:
    before = served.stats()
    assert before == {U: (100, HEADROOM, 0, 0), V: (110, HEADROOM, 0, 0)}
    served.apply(U, torch.tensor([5]), torch.ones(1, 8))
    assert served.stats()[U] == (100, HEADROOM, 1, 0)
    assert served.dense_version == served.version == VERSION
    assert served.tables == {U: (100, 8), V: (110, 4)}


def test_ids_without_headroom_are_refused_whole(
    served: serving.ServedModel, live: nn.Module
) -> None:
    ids = torch.arange(90, 101 + HEADROOM)  # one too many
    with pytest.raises(serving.NoHeadroomError, match=f"'{U}' has {HEADROOM} rows free.*need 301"):
        served.apply(U, ids, torch.ones(len(ids), 8))
    assert_same(served, live)
    assert served.stats()[U] == (100, HEADROOM, 0, 0)
    assert served.apply(U, ids[:-1], torch.ones(len(ids) - 1, 8)) == (HEADROOM, 10, 0)
    assert served.stats()[U].free_rows == 0


def test_each_load_has_rows_of_its_own(live_package: Package, live: nn.Module) -> None:
    with serving.load(live_package.path) as one, serving.load(live_package.path) as other:
        one.apply(U, torch.arange(100), torch.zeros(100, 8))
        assert_same(other, live)
    with serving.load(live_package.path) as again:  # with the code that the others have left
        assert_same(again, live)


def test_files_have_the_rows_that_are_in_use(live_package: Package) -> None:
    ((path, part),) = read_package_manifest(live_package.path).live.items()
    assert part.tables == [U, V]
    assert sorted(part.rows) == [100 + HEADROOM + 1, 110 + HEADROOM + 1]
    with safe_open(live_package.path / TABLES, "pt") as saved:  # type: ignore[no-untyped-call]
        rows = [saved.get_tensor(f"{path}.rows{slab}") for slab in range(2)]
    assert sorted(len(of_slab) for of_slab in rows) == [100, 110]


def mixed_packages(package: Package, folder: Path) -> dict[str, Path]:
    """Packages with a manifest that does not fit the other files, by the error."""
    manifest = read_package_manifest(package.path)
    ((path, part),) = manifest.live.items()
    constants = {name: file for name, file in manifest.constants.items() if name != f"{path}.free"}
    more = part._replace(rows=[*part.rows, 5], formats=[*part.formats, 0])
    fewer = part._replace(rows=[1, 1])
    changes: dict[str, dict[str, Any]] = {
        f"{path}.rows2": {"live": {path: more}},
        f"{path}.rows0": {"live": {path: fewer}},
        f"{path}.free": {"constants": constants},
    }
    return {
        tensor: with_manifest(package, folder / str(number), **change)
        for number, (tensor, change) in enumerate(changes.items())
    }


def test_mixed_packages_are_refused(live_package: Package, tmp_path: Path) -> None:
    for tensor, folder in mixed_packages(live_package, tmp_path).items():
        with pytest.raises(DamagedFileError, match=f"{tensor}'.*different packages were mixed"):
            serving.load(folder)


WRONG: dict[str, tuple[Callable[[serving.ServedModel], Any], type[Exception], str]] = {
    "table": (
        lambda s: s.apply("u", torch.arange(1), torch.ones(1, 8)),
        ValueError,
        r"ServedModel.apply: table is 'u', expected one of \['bags.u', 'bags.v'\]",
    ),
    "ids": (
        lambda s: s.apply(U, torch.ones(1), torch.ones(1, 8)),
        TypeError,
        "ServedModel.apply: ids is a tensor of dtype torch.float32",
    ),
    "rows": (
        lambda s: s.apply(U, torch.arange(1), torch.ones(1, 4)),
        ValueError,
        r"rows has shape \(1, 4\), expected \(1, 8\), a row of table 'bags.u' for each id",
    ),
    "erased": (
        lambda s: s.erase(U, torch.arange(4).reshape(2, 2)),
        ValueError,
        r"ServedModel.erase: ids has shape \(2, 2\), expected 1 dimension",
    ),
    "closed": (
        lambda s: (s.close(), s.apply(U, torch.arange(1), torch.ones(1, 8))),
        RuntimeError,
        "apply: this model is closed",
    ),
}


@pytest.mark.parametrize(("update", "error", "says"), WRONG.values(), ids=list(WRONG))
def test_wrong_updates_are_refused(
    served: serving.ServedModel,
    update: Callable[[serving.ServedModel], Any],
    error: type[Exception],
    says: str,
) -> None:
    with pytest.raises(error, match=says):
        update(served)


def test_a_package_without_headroom_says_what_to_do(package: Package) -> None:
    with serving.load(package.path) as frozen:
        for update in (
            lambda: frozen.apply(U, torch.arange(1), torch.ones(1, 8)),
            lambda: frozen.erase(U, torch.arange(1)),
        ):
            with pytest.raises(RuntimeError, match="only read: export the model with headroom="):
                update()
        assert frozen.stats() == {}


@pytest.mark.long
def test_tables_stay_until_an_update_has_ended(
    served: serving.ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another thread closes the model: what is written to has to be there."""
    apply = td.ops.serve_apply_

    def closed_before(*arguments: Any) -> Any:
        served.close()
        gc.collect()
        return apply(*arguments)

    monkeypatch.setattr("torch_dynemb.serving.live_state.ops.serve_apply_", closed_before)
    assert served.apply(U, torch.tensor([5, 500]), torch.ones(2, 8)) == (1, 1, 0)
    assert served.closed


def test_threads_run_and_update_one_package(served: serving.ServedModel) -> None:
    """All rows of ``u`` are one number, which grows: an output is of numbers of its time."""
    ids = torch.arange(100)
    served.apply(U, ids, torch.zeros(100, 8))
    begun, ended, stop = [0], [0], threading.Event()
    errors: list[str] = []
    inputs, shift = features(16, 64)
    inputs["u"] = (ids[:64], torch.arange(0, 65, 4))  # bags of 4 ids

    def read() -> None:
        while not stop.is_set():
            least = ended[0]
            pooled = served.run(inputs, shift)[1]["pooled"][:, :8]
            most = begun[0]
            if not bool((pooled >= 4 * least).all() and (pooled <= 4 * most).all()):
                errors.append(f"{least} to {most}: {pooled.tolist()}")
                return

    def write(first: int) -> None:
        """Others come and go."""
        new = torch.arange(10) + first
        for _ in range(50):
            served.apply(U, new, torch.ones(10, 8))
            served.erase(U, new)

    threads = [threading.Thread(target=read) for _ in range(2)]
    threads += [threading.Thread(target=write, args=(first,)) for first in (1000, 2000)]
    for thread in threads:
        thread.start()
    try:
        for version in range(1, 100):
            begun[0] = version
            served.apply(U, ids, torch.full((100, 8), float(version)))
            ended[0] = version
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert served.stats()[U] == (100, HEADROOM, 300, 0)


@pytest.mark.long
def test_packages_with_rows_of_8_bits_make_them_of_floats(
    live_package: Package, tmp_path: Path
) -> None:
    frozen = live_package.frozen
    with config.patch(QUICK):
        serving.export(
            frozen,
            tmp_path / "int8",
            features(4, 20),
            dynamic_shapes=dynamic_shapes(),
            rows="int8",
            headroom=10,
        )
    live = serving.live(frozen, rows="int8", headroom=10)
    with serving.load(tmp_path / "int8") as served:
        assert_same(served, live)
        ids, rows = torch.arange(95, 105), torch.randn(10, 8)
        assert served.apply(U, ids, rows) == tables_of(live).update("u", ids, rows) == (5, 5, 0)
        assert_same(served, live)
        with pytest.raises(RuntimeError, match="a range that no scale of its format holds"):
            served.apply(U, ids, rows / 0)
        assert_same(served, live)


# -- exports, without the compiler ---------------------------------------------------------------


class StopError(Exception):
    """Raised in place of compiling."""


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[torch.export.ExportedProgram]:
    """The programs that export gives to the compiler, which does not run."""
    given: list[torch.export.ExportedProgram] = []

    def stop(program: torch.export.ExportedProgram, **rest: object) -> None:
        given.append(program)
        raise StopError

    monkeypatch.setattr(export_module.torch._inductor, "aoti_compile_and_package", stop)
    return given


def rows_of(program: torch.export.ExportedProgram) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for name, t in program.constants.items() if ".rows" in name]


@pytest.mark.parametrize("kind", ["a model", "a frozen one", "a live one", "a counting one"])
def test_rows_and_headroom_of_an_export(
    tmp_path: Path, programs: list[torch.export.ExportedProgram], kind: str
) -> None:
    model: Any = small_model(many=0)
    options: dict[str, Any] = {"rows": "int8", "headroom": {"u": 5, "v": 7}}
    if kind == "a live one":
        model, options = serving.live(model, **options), {}
    elif kind == "a frozen one":
        model = td.freeze(model)
    elif kind == "a counting one":
        model = td.freeze(model, missing=True)
    with pytest.raises(StopError):
        serving.export(
            model, tmp_path / "p", features(4, 20), dynamic_shapes=dynamic_shapes(), **options
        )
    assert not list(tmp_path.iterdir())
    (program,) = programs
    # of 100 ids, the headroom and one more; 8 or 4 codes in 16 bytes
    assert sorted(rows_of(program)) == [(106, 2), (108, 2)]
    assert any("serve_lookup" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("options", [{"headroom": 3}, {"rows": "int8"}])
def test_a_live_model_has_its_rows_and_headroom(tmp_path: Path, options: dict[str, Any]) -> None:
    model = serving.live(small_model(many=0), headroom=5)
    with pytest.raises(ValueError, match="but the model is live already: give both to"):
        serving.export(model, tmp_path / "p", features(4, 20), **options)


def test_wrong_headroom_is_refused(tmp_path: Path) -> None:
    model = small_model(many=0)
    with pytest.raises(ValueError, match=r"headroom is -1"):
        serving.export(model, tmp_path / "p", features(4, 20), headroom=-1)
    with pytest.raises(ValueError, match=r"headroom has tables \['u'\], expected a num"):
        serving.export(model, tmp_path / "p", features(4, 20), headroom={"u": 1})
    assert not list(tmp_path.iterdir())


class TwoGroups(nn.Module):
    """Tables of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a = td.DynamicEmbeddingBag(4, mode="sum", name="a", optimizer=td.SGD(lr=0.1))
        self.b = td.DynamicEmbeddingBag(4, mode="sum", name="b", optimizer=td.SGD(lr=0.1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.a(ids) + self.b(ids)


def test_live_tables_of_two_modules_are_counted_and_have_headroom_apart() -> None:
    model = serving.live(td.freeze(TwoGroups(), missing=True), headroom={"a": 3, "b": 4})
    a, b = serving.live_tables(model).values()
    assert (a.free_rows(), b.free_rows()) == ({"a": 3}, {"b": 4})
    a.update("a", torch.tensor([7]), torch.ones(1, 4))
    assert model(torch.tensor([[7, 8]]))[1].tolist() == [1, 2]
