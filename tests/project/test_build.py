"""setup.py, Makefile and the built library: what is compiled, with what, and where it loads."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.cpu_only("the build")

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "torch_dynemb" / "_C.abi3.so"


@pytest.fixture(scope="module")
def build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_script", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# of the make that runs the tests
MAKE_VARIABLES = {"MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS", "DATA"}
MAKE_VARIABLES |= {"DYNEMB_CUDA", "DYNEMB_URING"}


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def make_toolkit(root: Path, *, architectures: str = "80 90 100") -> Path:
    """A directory that looks like a CUDA toolkit, with an nvcc that answers what setup.py asks."""
    names = " ".join(f"compute_{number}" for number in architectures.split())
    write_script(
        root / "bin" / "nvcc",
        f"""case "$1" in
--dryrun) echo '#$ _SPACE_= ' >&2; echo '#$ TOP={root}/bin/..' >&2 ;;
--list-gpu-arch) printf '%s\\n' {names} ;;
esac
""",
    )
    return root


def test_nvcc_behind_a_script_gives_its_toolkit(build_script: ModuleType, tmp_path: Path) -> None:
    toolkit = make_toolkit(tmp_path / "cuda-13.0")
    script = write_script(tmp_path / "on_path" / "nvcc", f'exec {toolkit}/bin/nvcc "$@"\n')
    assert build_script.cuda_root_of(str(script)) == toolkit
    path = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
    assert build_script.find_cuda_root({"PATH": path}) == toolkit


def test_cuda_home_comes_before_path(build_script: ModuleType, tmp_path: Path) -> None:
    first, second = make_toolkit(tmp_path / "first"), make_toolkit(tmp_path / "second")
    environ = {"CUDA_HOME": str(first), "PATH": str(second / "bin")}
    assert build_script.find_cuda_root(environ) == first
    del environ["CUDA_HOME"]
    assert build_script.find_cuda_root(environ) == second


def test_usual_place_comes_last(build_script: ModuleType, tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    environ = {"PATH": str(tmp_path / "empty")}
    assert build_script.find_cuda_root(environ, system_cuda=usual) is None
    make_toolkit(usual)
    assert build_script.find_cuda_root(environ, system_cuda=usual) == usual


def test_wrong_cuda_home_is_an_error(build_script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"CUDA_HOME=.* does not exist\. Correct CUDA_HOME"):
        build_script.find_cuda_root({"CUDA_HOME": str(tmp_path), "PATH": ""})


def test_nvcc_that_does_not_work_is_an_error(build_script: ModuleType, tmp_path: Path) -> None:
    broken = write_script(tmp_path / "nvcc", "echo no licence; exit 3\n")
    with pytest.raises(RuntimeError, match=r"'no licence' \(exit status 3\)\. Set CUDA_HOME"):
        build_script.cuda_root_of(str(broken))
    lying = write_script(tmp_path / "lying", f"echo '#$ TOP={tmp_path}/nowhere'\n")
    with pytest.raises(RuntimeError, match=r"nowhere/bin/nvcc does not exist"):
        build_script.cuda_root_of(str(lying))


@pytest.mark.parametrize(
    ("flag", "torch_cuda", "nvcc", "compiled"),
    [
        (None, None, True, False),  # of no use where torch has no CUDA
        (None, "13.0", True, True),
        (None, "13.0", False, False),
        ("1", None, True, True),
        ("0", "13.0", True, False),
        ("", None, True, False),  # make exports the variable in any case
    ],
)
def test_cuda_is_compiled_where_torch_has_it_or_on_request(
    build_script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    flag: str | None,
    torch_cuda: str | None,
    nvcc: bool,
    compiled: bool,
) -> None:
    toolkit = Path("/toolkit") if nvcc else None
    monkeypatch.setattr(build_script, "find_cuda_root", lambda environ: toolkit)
    environ = {} if flag is None else {"DYNEMB_CUDA": flag}
    root = build_script.wanted_cuda_root(environ, torch_cuda)
    assert (root is not None) == compiled
    said = build_script.said_of_cuda(environ, root)
    assert said.startswith("CUDA kernels are compiled" if compiled else "CUDA kernels are left out")


def test_a_wrong_request_for_cuda_is_an_error(
    build_script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="DYNEMB_CUDA='yes' should be 1"):
        build_script.wanted_cuda_root({"DYNEMB_CUDA": "yes"}, None)
    monkeypatch.setattr(build_script, "find_cuda_root", lambda environ: None)
    with pytest.raises(RuntimeError, match="DYNEMB_CUDA=1, but nvcc is missing"):
        build_script.wanted_cuda_root({"DYNEMB_CUDA": "1"}, "13.0")


@pytest.mark.parametrize("part", ["cuda", "uring"])
def test_another_request_for_a_part_builds_the_library_again(part: str) -> None:
    """The flag is part of make's stamp, in both directions."""
    stamps = list((ROOT / ".venv" / "stamps").glob(f"{part}-*"))
    if len(stamps) != 1:
        pytest.skip("the library was not built by make")
    was = stamps[0].name.removeprefix(f"{part}-")
    environ = {k: v for k, v in os.environ.items() if k not in MAKE_VARIABLES}
    flag = f"DYNEMB_{part.upper()}={'1' if was != '1' else '0'}"
    reply = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "build", flag],
        cwd=ROOT,
        env=environ,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "build_ext" in reply.stdout


URING_HEADER = """
struct io_uring {};
struct io_uring_probe;
enum { IORING_OP_READ };
extern "C" {
int io_uring_queue_init(unsigned, io_uring*, unsigned);
io_uring_probe* io_uring_get_probe_ring(io_uring*);
int io_uring_opcode_supported(io_uring_probe*, int);
void io_uring_free_probe(io_uring_probe*);
struct io_uring_sqe;
io_uring_sqe* io_uring_get_sqe(io_uring*);
void io_uring_prep_read(io_uring_sqe*, int, void*, unsigned, unsigned long long);
int io_uring_submit_and_wait(io_uring*, unsigned);
void io_uring_queue_exit(io_uring*);
}
"""


def make_uring(root: Path) -> dict[str, str]:
    """A directory with a header and an empty library, and an environment that leads to them.

    Without the system's own: the compiler says that it has none.
    """
    (root / "liburing.h").write_text(URING_HEADER)
    (root / "liburing.a").write_bytes(b"!<arch>\n")
    write_script(
        root / "bin" / "pkg-config",
        f"case $1 in --cflags-only-I) echo -I{root} ;; *) echo {root} ;; esac\n",
    )
    compiler = write_script(
        root / "bin" / "compiler",
        'case "$1" in -print-file-name=*) echo liburing.a ;; *) exec c++ "$@" ;; esac\n',
    )
    path = f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "CXX": str(compiler)}


def test_liburing_is_where_pkg_config_says(build_script: ModuleType, tmp_path: Path) -> None:
    environ = make_uring(tmp_path)
    uring = build_script.wanted_uring(environ)
    assert uring == (tmp_path / "liburing.a", tmp_path)
    assert str(uring.archive) in build_script.said_of_uring(environ, uring)
    extension = build_script.kernel_library(None, uring=uring)
    assert "-DDYNEMB_HAS_URING" in extension.extra_compile_args["cxx"]
    assert str(tmp_path) in extension.extra_compile_args["cxx"]
    assert str(uring.archive) in extension.extra_link_args


def test_liburing_is_where_the_compiler_looks(build_script: ModuleType, tmp_path: Path) -> None:
    environ = make_uring(tmp_path)
    write_script(tmp_path / "bin" / "pkg-config", "exit 1\n")
    script = f"""case "$1" in
-print-file-name=*) echo {tmp_path}/liburing.a ;;
*) exec c++ -I{tmp_path} "$@" ;;
esac
"""
    write_script(Path(environ["CXX"]), script)
    assert build_script.wanted_uring(environ) == (tmp_path / "liburing.a", None)


@pytest.mark.parametrize("missing", ["liburing.a", "liburing.h", "function", "pkg-config"])
def test_what_is_not_a_whole_liburing_is_left_out(
    build_script: ModuleType, tmp_path: Path, missing: str
) -> None:
    environ = make_uring(tmp_path)
    if missing == "function":  # of an old version
        header = URING_HEADER.replace("void io_uring_prep_read", "void io_uring_prep_other")
        (tmp_path / "liburing.h").write_text(header)
    elif missing == "pkg-config":
        environ["PATH"] = str(tmp_path / "nothing")
    elif missing == "liburing.h":  # the system may have one, with this name too
        (tmp_path / missing).write_text("#error none\n")
    else:
        (tmp_path / missing).unlink()
    assert build_script.wanted_uring(environ) is None
    assert build_script.said_of_uring(environ, None).startswith("io_uring is left out")
    with pytest.raises(RuntimeError, match=r"DYNEMB_URING=1, but .* apt-get install liburing-dev"):
        build_script.wanted_uring({**environ, "DYNEMB_URING": "1"})


def test_liburing_is_left_out_on_request(build_script: ModuleType, tmp_path: Path) -> None:
    environ = {**make_uring(tmp_path), "DYNEMB_URING": "0"}
    assert build_script.wanted_uring(environ) is None
    assert build_script.said_of_uring(environ, None).endswith("DYNEMB_URING=0")
    extension = build_script.kernel_library(None, uring=None)
    assert "-DDYNEMB_HAS_URING" not in extension.extra_compile_args["cxx"]
    with pytest.raises(RuntimeError, match="DYNEMB_URING='yes' should be 1"):
        build_script.wanted_uring({**environ, "DYNEMB_URING": "yes"})


def test_compilers_run_through_ccache_where_torch_does_not_see_to_it(
    build_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"PATH": str(tmp_path)}
    build_script.use_ccache(environ, None)
    assert environ == {"PATH": str(tmp_path)}
    write_script(tmp_path / "ccache", "")
    monkeypatch.delattr(build_script.cpp_extension, "_wrap_compiler", raising=False)
    build_script.use_ccache(environ, tmp_path / "cuda")
    build_script.use_ccache(environ, tmp_path / "cuda")  # a build in a build
    assert environ["CXX"] == "ccache c++"
    assert environ["PYTORCH_NVCC"] == f"ccache {tmp_path}/cuda/bin/nvcc"
    assert environ["CCACHE_BASEDIR"] == str(ROOT)


def test_architectures_are_those_that_nvcc_knows(build_script: ModuleType, tmp_path: Path) -> None:
    new = make_toolkit(tmp_path / "new", architectures="75 80 86 90 100 120")
    assert build_script.known_architectures(new) == ["80", "90", "100"]
    old = make_toolkit(tmp_path / "old", architectures="52 75 80 86 90")
    assert build_script.known_architectures(old) == ["80", "90"]
    too_old = make_toolkit(tmp_path / "too_old", architectures="35 75")
    with pytest.raises(RuntimeError, match=r"compiles for compute_35, compute_75"):
        build_script.known_architectures(too_old)


def test_machine_code_of_all_architectures_comes_from_one_intermediate_code(
    build_script: ModuleType, tmp_path: Path
) -> None:
    flags = build_script.architecture_flags(["80", "90", "100"], portable=True)
    assert flags == [
        "-gencode=arch=compute_80,code=[sm_80,sm_90,sm_100,compute_80]",
        "-DDYNEMB_CUDA_ARCHITECTURES=80_90_100",
    ]
    assert build_script.architecture_flags(["90"], portable=False) == [
        "-gencode=arch=compute_90,code=[sm_90]",
        "-DDYNEMB_CUDA_ARCHITECTURES=90",
    ]
    toolkit = make_toolkit(tmp_path / "cuda")
    runtime = toolkit / "lib64" / "libcudart_static.a"
    runtime.parent.mkdir()
    runtime.touch()
    assert set(flags) < set(build_script.kernel_library(toolkit, flags).extra_compile_args["nvcc"])


def test_every_source_is_compiled(build_script: ModuleType) -> None:
    expected = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))
    extension = build_script.kernel_library(None)
    assert extension.sources == expected
    assert "csrc/ops.cpp" in expected
    assert extension.name == "torch_dynemb._C"
    assert extension.py_limited_api


def test_cuda_sources_are_compiled_where_there_is_a_toolkit(
    build_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "csrc" / "cuda" / "lookup.cu"
    kernels.parent.mkdir(parents=True)
    kernels.touch()
    monkeypatch.setattr(build_script, "ROOT", tmp_path)
    monkeypatch.setattr(build_script, "SOURCES", tmp_path / "csrc")
    assert build_script.kernel_library(None).sources == []

    toolkit = make_toolkit(tmp_path / "cuda")
    with pytest.raises(RuntimeError, match=r"has nvcc but no libcudart_static\.a"):
        build_script.kernel_library(toolkit)
    runtime = toolkit / "targets" / f"{os.uname().machine}-linux" / "lib" / "libcudart_static.a"
    runtime.parent.mkdir(parents=True)
    runtime.touch()
    extension = build_script.kernel_library(toolkit)
    assert extension.sources == ["csrc/cuda/lookup.cu"]
    assert "cudart_static" in extension.libraries
    assert str(runtime.parent) in extension.library_dirs


@pytest.mark.long
def test_wheel_is_for_every_python_from_3_10() -> None:
    program = """
from distutils.core import run_setup
command = run_setup("setup.py", stop_after="init").get_command_obj("bdist_wheel")
command.ensure_finalized()
command.root_is_pure = False
print("-".join(command.get_tag()))
"""
    tag = subprocess.run(
        [sys.executable, "-c", "import setuptools\n" + program],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert re.fullmatch(r"cp310-abi3-\w+", tag.strip())


def undefined_symbols() -> list[str]:
    command = ["nm", "--dynamic", "--undefined-only", "--demangle", str(LIBRARY)]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [line.split(maxsplit=1)[1] for line in listing.splitlines()]


def test_library_needs_no_python_and_only_the_stable_abi() -> None:
    symbols = undefined_symbols()
    assert any(symbol.startswith(("aoti_torch_", "torch_")) for symbol in symbols)
    unstable = re.compile(r"_?Py[A-Z_]|.*\b(at|c10|torch)::")
    assert [symbol for symbol in symbols if unstable.match(symbol)] == []


@pytest.mark.long
def test_import_needs_torch_alone() -> None:
    program = "import sys, torch_dynemb; print({'torchrec', 'fbgemm_gpu'} & set(sys.modules))"
    reply = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert reply.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], "-m tutorials.dlrm.train"),
        (
            ["train", "DATA=a.tsv b.tsv", "ARGS=--resume"],
            "-m tutorials.dlrm.train a.tsv b.tsv --resume",
        ),
        (
            ["test", "WORKERS=3", "ARGS=-k optim"],
            "--numprocesses 3 --dist loadfile tests -k optim",
        ),
        (["test-long", "ARGS=-x"], "-m pytest tests -m long --timeout 3600 -x"),
        (["bench", "ARGS=--json"], "benchmarks/run.py --json"),
    ],
)
def test_make_passes_arguments_on(arguments: list[str], expected: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in MAKE_VARIABLES}
    reply = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", *arguments],
        cwd=ROOT,
        env=environ,
        check=True,
        capture_output=True,
        text=True,
    )
    assert " ".join(reply.stdout.splitlines()[-1].split()).endswith(expected)
