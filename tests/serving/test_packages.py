"""torch_dynemb.serving.export and load: the same bits as the frozen model, and errors before it."""

from __future__ import annotations

import copy
import errno
import json
import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from altered_packages import FILES, copied, with_manifest
from packaged import MANY, VERSION, SmallModel, dynamic_shapes, features, small_model
from safetensors import safe_open
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.errors import DamagedFileError
from torch_dynemb.files.checksummed_files import checksum_of_bytes
from torch_dynemb.files.claim import Claim
from torch_dynemb.files.disk import Disk
from torch_dynemb.serving.packages import export as export_module
from torch_dynemb.serving.packages import load as load_module
from torch_dynemb.serving.packages.manifest import (
    CODE,
    DENSE,
    MANIFEST,
    TABLES,
    read_package_manifest,
)
from torch_dynemb.serving.packages.memory import ALIGNMENT

if TYPE_CHECKING:
    from conftest import Package

pytestmark = pytest.mark.cpu_only("the package is compiled for the CPU")


@pytest.fixture(scope="module")
def served(package: Package) -> td.serving.ServedModel:
    return td.serving.load(package.path, runners=2)


@pytest.mark.parametrize(("batch", "ids"), [(4, 20), (0, 0), (1, 1), (1, 0), (7, 50), (256, 5000)])
def test_a_package_gives_the_bits_of_the_frozen_model(
    package: Package, served: td.serving.ServedModel, batch: int, ids: int
) -> None:
    inputs = features(batch, ids, seed=3)
    expected_score, expected = package.frozen(*inputs)
    score, others = served.run(*inputs)
    assert torch.equal(score, expected_score)
    assert list(others) == list(expected)
    assert all(torch.equal(others[name], expected[name]) for name in expected)


def test_a_served_model_says_what_it_is(served: td.serving.ServedModel) -> None:
    assert served.version == VERSION
    assert served.tables == {"bags.u": (100, 8), "bags.v": (100 + MANY, 4)}
    assert served.device == torch.device("cpu")
    assert not served.closed
    assert "shift: float32 (features_v.shape[0], 1)" in repr(served)


def test_a_served_model_counts_what_it_does_not_find(package: Package) -> None:
    with td.serving.load(package.path) as served:
        assert served.missing == {"bags.u": 0, "bags.v": 0}
        ids, shift = features(16, 100)
        absent = {"bags.u": int((ids["u"][0] >= 100).sum()), "bags.v": int((ids["v"] >= 100).sum())}
        assert min(absent.values()) > 0
        served.run(ids, shift)
        assert served.missing == absent
        served.run_flat([*ids["u"], ids["v"], shift])
        assert served.missing == {name: 2 * count for name, count in absent.items()}


def test_a_package_that_does_not_count_says_so(package: Package, tmp_path: Path) -> None:
    served = td.serving.load(with_manifest(package, tmp_path / "uncounted", missing=None))
    with pytest.raises(RuntimeError, match=r"does not count ids.*export the model with missing=Tr"):
        _ = served.missing


def test_features_may_come_in_another_order(served: td.serving.ServedModel) -> None:
    ids, shift = features(4, 20)
    turned = dict(reversed(ids.items()))
    assert list(turned) != list(ids)
    assert torch.equal(served(turned, shift)[0], served(ids, shift)[0])


def test_flat_inputs_give_flat_outputs(served: td.serving.ServedModel) -> None:
    ids, shift = features(4, 20)
    assert [given.name for given in served.inputs] == [
        "features_u_0",
        "features_u_1",
        "features_v",
        "shift",
    ]
    names = ["output_0", "output_1_pooled", "output_1_scale"]
    assert [of.name for of in served.outputs] == names
    flat = [*ids["u"], ids["v"], shift]
    score, others = served.run(ids, shift)
    assert all(
        torch.equal(a, b)
        for a, b in zip(served.run_flat(flat), [score, *others.values()], strict=True)
    )
    with pytest.raises(TypeError, match=r"run_flat: got 3 tensors, expected one each of \['fea"):
        served.run_flat(flat[:3])


def test_inputs_need_not_be_contiguous(served: td.serving.ServedModel) -> None:
    ids, shift = features(4, 20)
    assert isinstance(ids["v"], Tensor)
    strided = ids["v"].t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(served(ids | {"v": strided}, shift)[0], served(ids, shift)[0])


def changed(change: Callable[[dict[str, Any], Tensor], tuple[Any, ...]]) -> tuple[Any, ...]:
    ids, shift = features(4, 20)
    return change(copy.copy(ids), shift)


WRONG_INPUTS: dict[str, tuple[Callable[..., tuple[Any, ...]], type[Exception], str]] = {
    "one is missing": (lambda ids, shift: (ids,), TypeError, "put together"),
    "a feature is missing": (
        lambda ids, shift: ({"u": ids["u"]}, shift),
        TypeError,
        "put together",
    ),
    "a feature has another form": (
        lambda ids, shift: (ids | {"u": ids["v"]}, shift),
        TypeError,
        "put together",
    ),
    "no tensor": (lambda ids, shift: (ids, 1.0), TypeError, "'shift' is 1.0, expected a dense"),
    "another dtype": (
        lambda ids, shift: (ids, shift.double()),
        TypeError,
        "'shift' has dtype torch.float64, expected torch.float32",
    ),
    "another number of columns": (
        lambda ids, shift: (ids | {"v": ids["v"][:, :2]}, shift),
        ValueError,
        r"'features_v' has shape \(4, 2\), expected \(features_v\.shape\[0\], 3\)",
    ),
    "another number of dimensions": (
        lambda ids, shift: (ids, shift[:, 0]),
        ValueError,
        r"'shift' has shape \(4,\)",
    ),
    "another batch size": (
        lambda ids, shift: (ids, shift[:3]),
        ValueError,
        r"'shift' has shape \(3, 1\), .*is 4 by now",
    ),
    "another device": (
        lambda ids, shift: (ids, shift.to("meta")),
        ValueError,
        "'shift' is on meta, but the package was compiled for cpu",
    ),
    "wrong offsets": (
        lambda ids, shift: (ids | {"u": (ids["u"][0], ids["u"][1] + 1)}, shift),
        RuntimeError,
        "offsets",
    ),
}


@pytest.mark.parametrize(("change", "error", "says"), WRONG_INPUTS.values(), ids=list(WRONG_INPUTS))
def test_wrong_inputs_are_refused_and_the_next_run_is_right(
    served: td.serving.ServedModel,
    change: Callable[..., tuple[Any, ...]],
    error: type[Exception],
    says: str,
) -> None:
    before = served.run(*features(4, 20))[0]
    with pytest.raises(error, match=says):
        served.run(*changed(change))
    assert torch.equal(served.run(*features(4, 20))[0], before)


@pytest.mark.parametrize("count", [2, 5])
def test_threads_run_one_model(
    package: Package, served: td.serving.ServedModel, count: int
) -> None:
    """More than its runners wait, also where lookups of many ids release Python's lock."""
    batches = [features(16, 100 if seed % 2 else 5000, seed) for seed in range(20)]
    results: list[list[Tensor]] = [[] for _ in range(count)]

    def run(into: list[Tensor]) -> None:
        into += [served.run(*inputs)[0] for inputs in batches]

    threads = [threading.Thread(target=run, args=(into,)) for into in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for inputs, *outputs in zip(batches, *results, strict=True):
        assert all(torch.equal(output, package.frozen(*inputs)[0]) for output in outputs)


def test_a_closed_model_refuses_to_run_and_its_outputs_live_on(package: Package) -> None:
    with td.serving.load(package.path) as served:
        scale = served.run(*features(4, 20))[1]["scale"]
        with served._open("run").reading() as loaded:
            memory = loaded.memory
        assert not memory.has(scale)
        assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in memory.tensors.values())
    del memory, loaded
    assert served.closed
    assert scale.tolist() == [2.0]
    with pytest.raises(RuntimeError, match=r"this model is closed.*load the package again"):
        served.run(*features(4, 20))
    served.close()


def test_the_tables_are_safetensors_files_that_the_code_has_not(package: Package) -> None:
    # the names have the path of the module that counts missing ids
    frozen = td.serving.CountsMissing(package.frozen)
    expected = dict(frozen.named_buffers()) | dict(frozen.named_parameters())
    # which code for the CPU does not read
    expected = {name: of for name, of in expected.items() if ".generations" not in name}
    found = {}
    for file in (TABLES, DENSE):
        with safe_open(package.path / file, "pt") as saved:  # type: ignore[no-untyped-call]
            found |= {name: (file, saved.get_tensor(name)) for name in saved.keys()}  # noqa: SIM118
    assert found.keys() == expected.keys()
    for name, (file, tensor) in found.items():
        assert torch.equal(tensor, expected[name])
        assert file == (TABLES if "frozen_tables" in name else DENSE)
    assert (package.path / CODE).stat().st_size < (package.path / TABLES).stat().st_size


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["a bit", "its end", "all of it"])
def test_a_damaged_package_is_refused_by_name(
    package: Package, tmp_path: Path, name: str, damage: str
) -> None:
    folder = copied(package, tmp_path / "damaged", (name,))
    file = folder / name
    if damage == "all of it":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        if damage == "its end":
            del content[-1:]
        else:
            content[len(content) // 2] ^= 1
        file.write_bytes(content)
    error = FileNotFoundError if (name, damage) == (MANIFEST, "all of it") else DamagedFileError
    with pytest.raises(error, match=re.escape(str(folder))):
        td.serving.load(folder)


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a serving package: it does not exist"):
        td.serving.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"it has no manifest\.json"):
        td.serving.load(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="it is not a folder"):
        td.serving.load(tmp_path / "file")
    (tmp_path / MANIFEST).write_text(json.dumps({"format": "another"}))
    with pytest.raises(DamagedFileError, match="is not the manifest of a"):
        td.serving.load(tmp_path)


def test_manifests_of_other_programs_are_refused(package: Package, tmp_path: Path) -> None:
    """Fields that are missing, unknown, or of another type, with the right checksum."""
    folder = copied(package, tmp_path / "other", (MANIFEST,))
    content = json.loads((folder / MANIFEST).read_bytes())
    del content["crc32c"]
    own = ("format", "format_version")
    changed = [{k: v for k, v in content.items() if k != key} for key in content if key not in own]
    changed = [fields for fields in changed if "base" in fields or "base" not in content]
    changed += [content | {key: 3} for key in content if key not in (*own, "version", "base")]
    changed += [
        content | {"unknown": 1},
        content | {"tables": {"u": {}}},
        content | {"inputs": [{"name": "a", "dtype": "no_dtype", "sizes": [], "value": None}]},
        content | {"inputs": [{"name": "a", "dtype": "int64", "sizes": [{}], "value": None}]},
        content | {"files": {CODE: content["files"][CODE]}},
        content | {"constants": dict.fromkeys(content["constants"], "another file")},
        content | {"ops": {"dynemb::find": 3}},
    ]
    for fields in changed:
        text = json.dumps(fields, separators=(",", ":")).encode()[:-1]
        end = f',"crc32c":"{checksum_of_bytes(text):08x}"}}\n'
        (folder / MANIFEST).write_bytes(text + end.encode())
        with pytest.raises(DamagedFileError, match=r"not those that .*: another program"):
            td.serving.load(folder)


FOREIGN: dict[str, tuple[dict[str, Any], str]] = {
    "torch": ({"torch": "2.1.0"}, r"with torch 2\.1\.0, but this is torch .*: load it with"),
    "machine": ({"machine": "pdp11"}, "for pdp11, but this machine is"),
    "instructions": ({"instructions": ["avx9999"]}, "that has avx9999, which this one lacks"),
    "an op": ({"ops": {"dynemb::gone": ""}}, "calls dynemb::gone, which this torch_dynemb does"),
    "a schema": (
        {"ops": {"dynemb::find": "dynemb::find(int x) -> ()"}},
        r"calls dynemb::find\(int x\) -> \(\), which this torch_dynemb has as dynemb::find",
    ),
}


@pytest.mark.parametrize(("changes", "says"), FOREIGN.values(), ids=list(FOREIGN))
def test_a_package_for_something_else_is_refused(
    package: Package, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    folder = with_manifest(package, tmp_path / "foreign", **changes)
    with pytest.raises(RuntimeError, match=says):
        td.serving.load(folder)


def test_a_package_for_a_gpu_is_refused_where_there_is_none(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = with_manifest(package, tmp_path / "foreign", device="cuda")
    with pytest.raises(RuntimeError, match="for CUDA, but this process has no GPU"):
        td.serving.load(folder)


def test_a_package_of_a_later_format_is_refused(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(package, tmp_path / "later", (MANIFEST,))
    content = json.loads((folder / MANIFEST).read_bytes()) | {"format_version": 2}
    (folder / MANIFEST).write_text(json.dumps(content))
    words = "format version 2, but this torch_dynemb reads 1: export the model again"
    with pytest.raises(RuntimeError, match=words):
        td.serving.load(folder)


def test_a_tensor_that_the_code_asks_for_and_nobody_has_is_an_error(
    package: Package, tmp_path: Path
) -> None:
    constants = dict(read_package_manifest(package.path).constants)
    del constants["model.scale"]
    folder = with_manifest(package, tmp_path / "short", constants=constants)
    with pytest.raises(DamagedFileError, match="files of different packages were mixed"):
        td.serving.load(folder)


def test_memory_that_is_not_there_is_an_error(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object, **options: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("torch_dynemb.serving.packages.memory.mmap.mmap", refused)
    with pytest.raises(MemoryError, match=r"the constants take [0-9]+ bytes.*close other models"):
        load_module.load(package.path)
    monkeypatch.undo()
    monkeypatch.setattr("torch_dynemb.serving.packages.memory.ops.available_memory", lambda: 1000)
    with pytest.raises(MemoryError, match=r"take [0-9]+ bytes, but 1000 bytes of memory are free"):
        load_module.load(package.path)


WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "model": ({"model": 1}, TypeError, "model is 1, expected a torch.nn.Module"),
    "path": ({"path": 1}, TypeError, "path is 1, expected a str or a Path"),
    "example_inputs": ({"example_inputs": [1]}, TypeError, "expected a tuple of the positional"),
    "version": ({"version": 1.5}, TypeError, "version is 1.5, expected a str, an int or None"),
    "missing": ({"missing": 1}, TypeError, "missing is 1, expected True or False"),
    "version as a bool": ({"version": True}, TypeError, "version is True"),
}


@pytest.mark.parametrize(
    ("changes", "error", "says"), WRONG_ARGUMENTS.values(), ids=list(WRONG_ARGUMENTS)
)
def test_wrong_arguments_of_export(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    arguments: dict[str, Any] = {
        "model": SmallModel(),
        "path": tmp_path / "package",
        "example_inputs": features(4, 20),
    }
    with pytest.raises(error, match=re.escape(says)):
        td.serving.export(**{**arguments, **changes})
    assert not list(tmp_path.iterdir())


def test_export_replaces_nothing(package: Package) -> None:
    before = {name: (package.path / name).stat().st_mtime_ns for name in FILES}
    with pytest.raises(FileExistsError, match="exists: choose another path"):
        td.serving.export(SmallModel(), package.path, features(4, 20))
    assert {name: (package.path / name).stat().st_mtime_ns for name in FILES} == before


def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(program: object, *, package_path: str, inductor_configs: object) -> None:
        Path(package_path).write_bytes(b"begun")
        raise RuntimeError("no compiler")

    monkeypatch.setattr(export_module.torch._inductor, "aoti_compile_and_package", fails)
    with pytest.raises(RuntimeError, match="no compiler"):
        td.serving.export(
            small_model(), tmp_path / "p", features(4, 20), dynamic_shapes=dynamic_shapes()
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_an_export_that_is_not_on_the_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(disk: Disk, path: Path) -> None:
        if path == tmp_path:  # which has the name of the package by then
            raise OSError(errno.EIO, "the disk fails")

    dead = tmp_path / f"p.tmp-{'0' * 32}"
    dead.mkdir()
    Claim(dead).release()
    monkeypatch.setattr(Disk, "sync_folder", fails)
    with pytest.raises(OSError, match="the disk fails"):
        td.serving.export(
            small_model(), tmp_path / "p", features(4, 20), dynamic_shapes=dynamic_shapes()
        )
    assert not list(tmp_path.iterdir())


class TwoFeatures(torch.nn.Module):
    """Bags of one length only, so that nothing in a batch is ragged."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = td.DynamicEmbeddingBagCollection(
            [td.TableConfig("u", 4), td.TableConfig("v", 4)], optimizer=td.SGD(lr=0.1)
        )

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return self.bags({"u": u, "v": v})


def exported_program(
    model: torch.nn.Module, inputs: tuple[Tensor, ...], dynamic: Any, **options: Any
) -> torch.export.ExportedProgram:
    """The program that serving.export gives to the compiler."""
    programs: list[torch.export.ExportedProgram] = []

    def stop(program: torch.export.ExportedProgram, **rest: object) -> None:
        programs.append(program)
        raise InterruptedError

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(export_module.torch._inductor, "aoti_compile_and_package", stop)
        with pytest.raises(InterruptedError):
            td.serving.export(model, Path(folder) / "p", inputs, dynamic_shapes=dynamic, **options)
    return programs[0]


def test_no_op_of_an_exported_program_has_an_empty_list_of_tensors() -> None:
    """Code that AOTInductor has compiled cannot call one (torch 2.13)."""
    model = TwoFeatures()
    ids = torch.arange(12).reshape(4, 3)
    model(ids, ids)
    batch = torch.export.Dim.DYNAMIC
    program = exported_program(model, (ids, ids), ({0: batch}, {0: batch}))
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "dynemb":
            for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
                assert "Tensor[]" not in str(argument.type) or len(value) > 0, node
    model.eval()
    for size in (0, 1, 4, 7):
        u, v = torch.arange(6 * size).reshape(2, size, 3)
        assert torch.equal(program.module()(u, v), model(u, v))


def test_an_example_that_is_given_twice_makes_two_inputs() -> None:
    model = TwoFeatures()
    ids = torch.arange(12).reshape(4, 3)
    program = exported_program(model, (ids, ids), None)
    used = [node.name for node in program.graph.nodes if node.op == "placeholder" and node.users]
    assert {"u", "v"} <= set(used)


def test_rows_are_stored_as_asked() -> None:
    model = TwoFeatures()
    ids = torch.arange(12).reshape(4, 3)
    model(ids, ids).sum().backward()
    program = exported_program(model, (ids, ids), None, rows="int8")
    expected = td.freeze(model, rows="int8").state_dict()
    assert program.state_dict.keys() == expected.keys()
    assert all(torch.equal(program.state_dict[name], expected[name]) for name in expected)
    assert any(tensor.dtype == torch.uint8 for tensor in expected.values())


def test_rows_of_a_frozen_model_are_what_they_are(tmp_path: Path) -> None:
    frozen = td.freeze(TwoFeatures())
    ids = torch.arange(12).reshape(4, 3)
    with pytest.raises(ValueError, match="rows is 'int8', but the model is frozen already"):
        td.serving.export(frozen, tmp_path / "p", (ids, ids), rows="int8")
    assert not list(tmp_path.iterdir())


def test_a_model_on_two_devices_is_refused(tmp_path: Path) -> None:
    model = SmallModel()
    model.top.to("meta")
    with pytest.raises(ValueError, match=r"on several devices \(.*'top.bias' on meta"):
        td.serving.export(model, tmp_path / "p", features(4, 20))


def test_runners_is_checked(package: Package) -> None:
    with pytest.raises(ValueError, match=r"serving\.load: runners is 0, expected at least 1"):
        td.serving.load(package.path, runners=0)
