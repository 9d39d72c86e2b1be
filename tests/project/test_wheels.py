"""What goes into a wheel and into a source distribution."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
from setuptools import Distribution

import torch_dynemb

pytestmark = pytest.mark.cpu_only("the build")

ROOT = Path(__file__).resolve().parents[2]


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"wheels_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def build_script() -> ModuleType:
    return module(ROOT / "setup.py")


@pytest.fixture(scope="module")
def wheels(monkeypatch_module: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch_module.syspath_prepend(str(ROOT / "tests" / "tools"))
    return module(ROOT / "tests" / "tools" / "wheels.py")


@pytest.fixture(scope="module")
def monkeypatch_module() -> pytest.MonkeyPatch:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def test_a_label_follows_the_version(build_script: ModuleType) -> None:
    assert build_script.version({}) == torch_dynemb.__version__
    labelled = build_script.version({"DYNEMB_VERSION_LABEL": "cu130"})
    assert labelled == f"{torch_dynemb.__version__}+cu130"
    for label in ("CPU", "+cpu", "a-b", "."):
        with pytest.raises(SystemExit, match="DYNEMB_VERSION_LABEL"):
            build_script.version({"DYNEMB_VERSION_LABEL": label})


def test_the_label_of_cuda_is_that_of_nvcc(wheels: ModuleType, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    assert wheels.cuda_release(nvcc) == "cu128"
    nvcc.write_text("#!/bin/sh\necho nothing\n")
    with pytest.raises(SystemExit, match="names no release: nothing"):
        wheels.cuda_release(nvcc)


def test_wheels_have_the_headers_of_programs(
    build_script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    command = build_script.BuildPackage(
        Distribution({"packages": ["torch_dynemb"], "script_name": "setup.py"})
    )
    command.build_lib = str(tmp_path)
    command.ensure_finalized()
    command.run()
    include = tmp_path / "torch_dynemb" / "include"
    copied = {str(path.relative_to(include)) for path in include.rglob("*.h")}
    assert {"serving/model.h", "serving/versioned_model.h", "core/columns.h"} <= copied
    for name in copied:
        assert (include / name).read_bytes() == (ROOT / "csrc" / name).read_bytes()
        named = re.findall(r'#include "([^"]+)"', (include / name).read_text())
        assert copied.issuperset(named)


def test_a_wheel_without_a_tag_is_refused(wheels: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no manylinux tag"):
        wheels.check(tmp_path / "torch_dynemb-1+cpu-cp310-abi3-linux_x86_64.whl", tmp_path)


def unpacked(directory: Path) -> Path:
    """The source distribution of this repository."""
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")
    return directory / archive.name.removesuffix(".tar.gz")


@pytest.mark.long
def test_a_source_distribution_has_what_a_build_reads(tmp_path: Path) -> None:
    sources = unpacked(tmp_path)
    tracked = subprocess.run(
        ["git", "ls-files", "csrc", "torch_dynemb"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    wanted = {name for name in tracked if not name.endswith(".md")}
    wanted |= {"setup.py", "pyproject.toml", "README.md", "LICENSE"}
    missing = sorted(name for name in wanted if not (sources / name).is_file())
    assert not missing


@pytest.mark.long
def test_a_source_distribution_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation"]
    command += ["--no-deps", "--wheel-dir", str(tmp_path), str(unpacked(tmp_path))]
    subprocess.run(command, check=True, env={**os.environ, "DYNEMB_CUDA": "0"})
    (wheel,) = tmp_path.glob("*.whl")
    assert f"-{torch_dynemb.__version__}-cp310-abi3-linux" in wheel.name
