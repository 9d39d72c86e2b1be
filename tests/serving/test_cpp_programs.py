"""C++ programs that run packages: their flags, and the whole one of tutorials/serving."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from http_server import ROOT, environment

from torch_dynemb import serving

pytestmark = pytest.mark.cpu_only("packages are compiled for the CPU")


def test_flags_name_what_is_there() -> None:
    flags = serving.cpp_flags()
    folders = [Path(flag.removeprefix("-I")) for flag in flags.compile if flag.startswith("-I")]
    assert [(folder / "serving" / "model.h").is_file() for folder in folders] == [True]
    assert flags.library.is_file()
    linked = [Path(flag.removeprefix("-L")) for flag in flags.link if flag.startswith("-L")]
    assert any((folder / "libtorch_cpu.so").is_file() for folder in linked)


def test_an_installation_without_headers_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch_dynemb"
    monkeypatch.setattr("torch_dynemb.serving.packages.cpp.LIBRARY", package / "_C.abi3.so")
    with pytest.raises(RuntimeError, match=r"has no C\+\+ headers: install torch_dynemb again"):
        serving.cpp_flags()
    (package / "include" / "serving").mkdir(parents=True)
    (package / "include" / "serving" / "model.h").touch()
    assert f"-I{package / 'include'}" in serving.cpp_flags().compile


@pytest.mark.long
def test_the_program_of_the_tutorial(tmp_path: Path) -> None:
    page = (ROOT / "tutorials" / "serving" / "README.md").read_text()
    program = page.split("user 1 another row:\n\n", 1)[1].split("\n\nIt is compiled", 1)[0]
    (tmp_path / "main.cpp").write_text(textwrap.dedent(program))
    (tmp_path / "torch_dynemb").symlink_to(serving.cpp_flags().library.parent)

    def said(command: list[str]) -> str:
        reply = subprocess.run(
            command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
        )
        assert reply.returncode == 0, reply.stderr
        return reply.stdout

    said([sys.executable, "-m", "tutorials.serving.export_model", "clicks", "--version", "1"])
    compiler = [sys.executable, "-m", "tutorials.serving.compile_command", "main"]
    said(shlex.split(said([*compiler, "--source", "main.cpp"])))
    lines = said([os.fspath(tmp_path / "main")]).splitlines()
    assert lines[:2] == ["takes user", "takes item"]
    assert any(line.startswith("bags.user: ") and "16 columns" in line for line in lines)
    outputs = [line for line in lines if line.strip().startswith("0.")]
    assert len(outputs) == 4  # two runs of two samples
    assert outputs[0] != outputs[2]  # user 1 got another row
    assert outputs[1] == outputs[3]
