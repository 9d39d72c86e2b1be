"""The shim before the C library: it fails, holds and writes down what programs do with files."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import crash_states
import file_shim
import pytest
from crash_states import read_log
from file_shim import SHORT, Fault, Hold

pytestmark = pytest.mark.cpu_only("files, and no tables")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder for a program, beside that of the shim."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def run(program: str, folder: Path, environment: dict[str, str]) -> str:
    """What a Python program prints that runs in a folder."""
    command = [sys.executable, "-S", "-E", "-c", f"import os, errno\n{program}"]
    reply = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert reply.returncode == 0, reply.stderr
    return reply.stdout.strip()


# prints the name of an error, and goes on
TRY = """
def attempt(call, *arguments):
    try:
        return call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
"""

# every call as CPython makes it; each of them fails in one of the cases below
EVERY_CALL = f"""{TRY}
file = os.open("a", os.O_RDWR | os.O_CREAT)
other = os.open("z", os.O_RDWR | os.O_CREAT)
os.pwrite(other, b"0123456789", 0)
def again():
    return os.pwrite(file, b"0123456789", 0)
attempt(again)
results = dict(
    pwrite=attempt(again),
    write=attempt(os.write, file, b"01"),
    pread=attempt(os.pread, other, 10, 0),
    read=attempt(os.read, other, 10),
    fsync=attempt(os.fsync, file),
    fdatasync=attempt(os.fdatasync, file),
    ftruncate=attempt(os.ftruncate, file, 5),
    fallocate=attempt(os.posix_fallocate, file, 0, 100),
    open=attempt(os.open, "b", os.O_CREAT),
    mkdir=attempt(os.mkdir, "m"),
    link=attempt(os.link, "z", "l"),
    rename=attempt(os.rename, "z", "y"),
    unlink=attempt(os.unlink, "a"),
)
print({{name: result for name, result in results.items() if isinstance(result, str)}})
"""


def test_chosen_calls_fail(tmp_path: Path, work: Path) -> None:
    """Each kind by itself, and nothing else with it."""
    assert run(EVERY_CALL, work, file_shim.environment(tmp_path)) == "{}"
    for i, call in enumerate(file_shim.CALLS):
        folder = work / str(i)
        folder.mkdir()
        # the first two files are made before
        fault = Fault(call, folder, errno.EIO, first=3 if call == "open" else 1)
        if call == "pwrite":
            fault = Fault(call, folder, errno.ENOSPC, first=3)
        name = "ENOSPC" if call == "pwrite" else "EIO"
        environment = file_shim.environment(tmp_path, faults=[fault])
        assert run(EVERY_CALL, folder, environment) == str({call: name})


def test_the_number_of_a_fault_and_what_follows(tmp_path: Path, work: Path) -> None:
    program = f"""{TRY}
file = os.open("a", os.O_RDWR | os.O_CREAT)
print(*[attempt(os.pwrite, file, b"0123456789", 0) for _ in range(6)])
print(*[attempt(os.pread, file, 10, 0) for _ in range(3)])
elsewhere = os.open("b", os.O_RDWR | os.O_CREAT)
print(*[attempt(os.pwrite, elsewhere, b"0123456789", 0) for _ in range(3)])
"""
    faults = [
        Fault("pwrite", work / "a", errno.EIO, first=2, times=2),
        Fault("pwrite", work / "a", SHORT, first=5),
        Fault("pread", work / "a", SHORT, first=2, times=1),
    ]
    printed = run(program, work, file_shim.environment(tmp_path, faults=faults))
    whole, half = str(b"0123456789"), str(b"01234")
    assert printed.splitlines() == [
        "10 EIO EIO 10 5 5",
        f"{whole} {half} {whole}",
        "10 10 10",
    ]


def test_faults_are_switched_on_and_off(tmp_path: Path, work: Path) -> None:
    switch = tmp_path / "on"
    program = f"""{TRY}
file = os.open("a", os.O_RDWR | os.O_CREAT)
def write():
    return attempt(os.pwrite, file, b"01", 0)
before = write()
os.close(os.open({str(switch)!r}, os.O_CREAT))
during = write(), write()
os.unlink({str(switch)!r})
print(before, *during, write())
"""
    faults = [Fault("pwrite", work, errno.ENOSPC, first=2, switch=switch)]
    assert run(program, work, file_shim.environment(tmp_path, faults=faults)) == "2 2 ENOSPC 2"


def test_calls_wait_while_a_file_is_there(tmp_path: Path, work: Path) -> None:
    hold = Hold("fsync", work / "a", tmp_path / "hold")
    hold.switch.touch()
    program = (
        "f = os.open('a', os.O_CREAT | os.O_RDWR); print(1, flush=True); os.fsync(f); print(2)"
    )
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", f"import os; {program}"],
        cwd=work,
        env=file_shim.environment(tmp_path, holds=[hold]),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    end = time.monotonic() + 60
    while not hold.reached.exists() and time.monotonic() < end:
        assert process.poll() is None
    assert hold.reached.exists()
    assert process.poll() is None
    hold.switch.unlink()
    assert process.communicate(timeout=60)[0] == "2\n"
    assert process.returncode == 0


def test_the_log_has_what_changed_below_its_folder(tmp_path: Path, work: Path) -> None:
    program = """
os.mkdir("d")
f = os.open("d/a", os.O_RDWR | os.O_CREAT, 0o600)
os.write(f, b"first"); os.write(f, b"second"); os.pwrite(f, b"third", 100)
os.ftruncate(f, 103); os.posix_fallocate(f, 0, 200); os.fsync(f); os.fdatasync(f)
os.pread(f, 10, 0); os.close(os.open("d/a", os.O_RDONLY))
os.rename("d/a", "d/b"); os.link("d/b", "c"); os.unlink("d/b")
os.pwritev(f, [b"fo", b"urth"], 1)
g = os.open(".", os.O_RDONLY); os.fsync(g)
os.close(os.open("c", os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
with open("../outside", "w") as file: file.write("x")
os.rmdir("d")
with open("e", "wb") as file: file.write(b"fifth")
"""
    run(program, work, file_shim.environment(tmp_path, log=work))
    changes = read_log(tmp_path / "changes.log", work)
    assert [str(change) for change in changes] == [
        *("mkdir d", "open d/a", "write d/a", "write d/a", "write d/a", "truncate d/a"),
        *("allocate d/a", "sync d/a", "sync d/a", "rename d/a d/b", "link d/b c", "unlink d/b"),
        *("write d/b (deleted)", "sync", "open c", "unlink d", "open e", "write e"),
    ]
    writes = [(c.offset, c.data) for c in changes if c.kind == crash_states.WRITE]
    assert writes == [(0, b"first"), (5, b"second"), (100, b"third"), (1, b"fourth"), (0, b"fifth")]
    sizes = [(c.offset, c.size) for c in changes if c.kind in (2, 3)]
    assert sizes == [(0, 103), (0, 200)]
    flags = [c.flag for c in changes if c.kind == crash_states.OPEN]
    assert flags == [os.O_CREAT, os.O_TRUNC, os.O_CREAT | os.O_TRUNC]
    assert all(change.begin <= change.at for change in changes)


# The C library's functions that CPython or our C++ code may have been compiled to call.
VARIANTS = """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
off = ctypes.c_long
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_char_p), ("size", ctypes.c_size_t)]
def parts(data):
    return ctypes.byref(Part(data, len(data)))
mode = 0o600
at = -100
files = []
for i, name in enumerate(["open", "open64", "creat", "creat64", "openat", "openat64"]):
    flags = [] if "creat" in name else [os.O_CREAT | os.O_RDWR]
    folder = [at] if "at" in name and "creat" not in name else []
    files.append(getattr(c, name)(*folder, b"f%d" % i, *flags, mode))
f = files[0]
buffer = ctypes.create_string_buffer(b"abc")
for name in ["pwrite", "pwrite64"]: assert getattr(c, name)(f, b"abc", 3, off(7)) == 3
for name in ["pwritev", "pwritev64"]: assert getattr(c, name)(f, parts(b"abc"), 1, off(8)) == 3
for name in ["pwritev2", "pwritev64v2"]:
    assert getattr(c, name)(f, parts(b"abc"), 1, off(9), 0) == 3
assert c.write(f, b"abc", 3) == 3 and c.writev(f, parts(b"abc"), 1) == 3
for name in ["fsync", "fdatasync"]: assert getattr(c, name)(f) == 0
for name in ["ftruncate", "ftruncate64"]: assert getattr(c, name)(f, off(20)) == 0
for name in ["truncate", "truncate64"]: assert getattr(c, name)(b"f0", off(20)) == 0
for name in ["fallocate", "fallocate64"]: assert getattr(c, name)(f, 0, off(0), off(9)) == 0
for name in ["posix_fallocate", "posix_fallocate64"]:
    assert getattr(c, name)(f, off(0), off(9)) == 0
assert c.mkdir(b"d0", mode) == 0 and c.mkdirat(at, b"d1", mode) == 0
assert c.rename(b"f0", b"g0") == 0 and c.renameat(at, b"f1", at, b"g1") == 0
assert c.renameat2(at, b"f2", at, b"g2", 0) == 0
assert c.link(b"g0", b"l0") == 0 and c.linkat(at, b"g1", at, b"l1", 0) == 0
assert c.unlink(b"l0") == 0 and c.unlinkat(at, b"l1", 0) == 0 and c.rmdir(b"d0") == 0
assert c.remove(b"g0") == 0 and c.remove(b"d1") == 0
"""


def test_every_variant_of_a_call_is_seen(tmp_path: Path, work: Path) -> None:
    run(VARIANTS, work, file_shim.environment(tmp_path, log=work))
    names = [crash_states.NAMES[change.kind] for change in read_log(tmp_path / "changes.log", work)]
    expected = {"open": 6, "write": 8, "sync": 2, "truncate": 4, "allocate": 4, "mkdir": 2}
    expected |= {"rename": 3, "link": 2, "unlink": 5}
    assert {name: names.count(name) for name in names} == expected


READS = """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
off = ctypes.c_long
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(9)
part = ctypes.byref(Part(ctypes.addressof(memory), 8))
f = os.open("f", os.O_RDONLY)
print(*[getattr(c, name)(f, memory, 8, off(0)) for name in ["pread", "pread64"]])
print(*[getattr(c, name)(f, memory, 8, off(0), 9) for name in ["__pread_chk", "__pread64_chk"]])
print(*[getattr(c, name)(f, part, 1, off(0)) for name in ["preadv", "preadv64"]])
print(*[getattr(c, name)(f, part, 1, off(0), 0) for name in ["preadv2", "preadv64v2"]])
print(c.read(f, memory, 2), c.readv(f, part, 1), c.__read_chk(f, memory, 2, 9))
"""


def test_every_variant_of_a_read_fails(tmp_path: Path, work: Path) -> None:
    (work / "f").write_bytes(bytes(100))
    faults = [Fault("pread", work, SHORT), Fault("read", work, errno.EIO)]
    environment = file_shim.environment(tmp_path, faults=faults)
    assert run(READS, work, environment).split() == ["4"] * 8 + ["-1"] * 3


def test_a_wrong_configuration_ends_the_process(tmp_path: Path) -> None:
    """A test that sees nothing would prove nothing."""
    environment = file_shim.environment(tmp_path)
    (tmp_path / "file_shim.txt").write_text("falt\tpwrite\t1\t1\t5\t/\t\n")
    reply = subprocess.run(["true"], env=environment, capture_output=True, text=True, check=False)
    assert reply.returncode != 0
    assert "file_shim: a line of the configuration is none" in reply.stderr


@pytest.mark.long
def test_the_compiled_reader_reads_on_after_short_and_interrupted_reads(
    tmp_path: Path, work: Path
) -> None:
    """By threads, with calls that the shim sees: whole blocks, and an error where one occurs."""
    pages = 200
    data = os.urandom(4096 * pages)
    (work / "rows").write_bytes(data)
    kinds = {"short": (SHORT, 1), "interrupted": (errno.EINTR, 3), "broken": (errno.EIO, 1)}
    faults = [
        Fault("pread", work, error, first=70, times=times, switch=tmp_path / kind)
        for kind, (error, times) in kinds.items()
    ]
    program = f"""
import sys
sys.path[:] = {sys.path!r}
import torch
from torch_dynemb import ops
data = open("rows", "rb").read()
offsets = torch.arange({pages}).flip(0) * 4096
for kind in {list(kinds)!r}:
    switch = {str(tmp_path)!r} + "/" + kind
    open(switch, "w").close()
    try:
        blocks = ops.read_blocks("rows", offsets, block_bytes=4096, io=ops.IoPath.THREADS)
        print(kind, bytes(blocks.flip(0).numpy()) == data)
    except RuntimeError as error:
        print(kind, "1 of {pages} blocks" in str(error), "Input/output error" in str(error))
    os.unlink(switch)
"""
    environment = file_shim.environment(tmp_path, faults=faults)
    printed = run(program, work, environment)
    assert printed.splitlines() == ["short True", "interrupted True", "broken True True"]


def test_nothing_happens_in_a_process_that_is_not_told(tmp_path: Path, work: Path) -> None:
    environment = {k: v for k, v in file_shim.environment(tmp_path).items() if "SHIM" not in k}
    assert run(EVERY_CALL, work, environment) == "{}"
    assert ctypes.sizeof(ctypes.c_long) == 8  # an offset, in the programs above
