"""Killed again and again, a training run of the DLRM tutorial ends as if nothing had happened."""

from __future__ import annotations

import copy
import io
import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import killed_job
import numpy as np
import pytest
import torch
from started import start_server
from torch import Tensor

import torch_dynemb as td
from tutorials.dlrm import options, train
from tutorials.dlrm.job import checkpoint
from tutorials.dlrm.job.generate import generate
from tutorials.dlrm.job.planted import PlantedConfig
from tutorials.dlrm.model import DLRM

pytestmark = [
    pytest.mark.cpu_only("the job of a tutorial, on the CPU"),
    pytest.mark.usefixtures("no_report"),
]

BATCH = 200
STEPS = 45
EVERY = 3  # steps between checkpoints


def command(data: Path, out: Path) -> list[str]:
    return [
        *(str(data), "--out", str(out), "--no-baseline"),
        *("--batch-size", str(BATCH), "--checkpoint-every", str(EVERY), "--log-every", "4"),
        *("--threads", "2"),
    ]


def run(arguments: list[str]) -> tuple[dict[str, Any], str]:
    """The result of the job in this process, without what it says of time, and its stderr."""
    threads = torch.get_num_threads()
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        train.main(arguments)
    torch.set_num_threads(threads)
    result = json.loads(out.getvalue().splitlines()[-1])
    del result["samples_per_s"]
    return result, err.getvalue()


def run_killed(of: Callable[..., None], *arguments: Any) -> None:
    """The job in a process that kills itself."""
    process = start_server().Process(target=of, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def unfinished(out: Path) -> list[Path]:
    return list(out.glob("checkpoint.tmp-*"))


class Saved(NamedTuple):
    """What a checkpoint has, in three ways.

    Attributes:
        state: what the job had given, without the time that it took.
        model: raw state of a model that has loaded it, every id in its slot and row.
        files: their bytes.
    """

    state: dict[str, Any]
    model: dict[str, Tensor]
    files: dict[str, bytes]


def saved(arguments: list[str]) -> Saved:
    """The checkpoint of a run of the job."""
    opts = options.parse(arguments)
    path = checkpoint.path_of(opts)
    model = DLRM(train.make_rows(opts, train.open_data(opts, quiet=True)), opts.embedding_dim)
    report = td.checkpoint.load(path, model)
    assert all(table.exact for table in report.tables.values())
    progress = report.state["progress"]
    progress["points"] = [(*point[:3], *point[5:]) for point in progress["points"]]  # as the next
    del progress["seconds"]  # is of no two runs the same
    files = {"/".join(file.parts[-2:]): file.read_bytes() for file in path.glob("*/*/*")}
    return Saved(report.state, model.state_dict(), files)


def raw(tensor: Tensor) -> np.ndarray:
    """View a contiguous tensor as bytes."""
    return tensor.view(-1).view(torch.uint8).numpy()


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Name the entries in which two states differ, tensors by their bits."""
    if type(a) is not type(b):
        return [path]
    if isinstance(a, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and np.array_equal(raw(a), raw(b))
        return [] if same else [path]
    if isinstance(a, dict) and a.keys() == b.keys():
        return [d for key in a for d in differences(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, list | tuple) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in differences(x, y, f"{path}/{i}")]
    return [] if a == b else [path]


def tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for entry in state.values() if isinstance(state, dict) else state:
            yield from tensors(entry)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    samples = STEPS * BATCH * 10 // 9  # one tenth is held out
    return generate(PlantedConfig(samples=samples), tmp_path_factory.mktemp("data")).path


@pytest.fixture(scope="module")
def whole_out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(data, whole_out) -> tuple[dict[str, Any], Saved]:
    """Result and final checkpoint of a run that is left alone."""
    result, _ = run(command(data, whole_out))
    return result, saved(command(data, whole_out))


@pytest.mark.long
def test_killed_and_resumed(data, whole, tmp_path):
    whole_result, whole_saved = whole
    path = tmp_path / "checkpoint"
    chance = random.Random(0)
    lines_before = 0
    for attempt in range(5):
        arguments = command(data, tmp_path)
        arguments += ["--resume"] if attempt else []
        arguments += ["--async-checkpoint"] if attempt in (0, 3) else []
        if attempt in (1, 3):
            for folder in unfinished(tmp_path):  # of the run before, which would look like its own
                shutil.rmtree(folder)
            run_killed(killed_job.in_save, arguments, chance.randint(2, 3), chance.randint(1, 20))
            assert unfinished(tmp_path)
        else:
            left = STEPS - lines_before // BATCH
            run_killed(killed_job.after_step, arguments, chance.randint(1, left // 2))
        state = checkpoint.read(path)
        if state is not None:
            lines = state["position"][3]
            assert lines >= lines_before
            assert lines % (BATCH * EVERY) == 0 or lines == STEPS * BATCH
            lines_before = lines
    assert lines_before > 0
    result, err = run([*command(data, tmp_path), "--resume", "--async-checkpoint"])
    assert f"resuming after line {lines_before} " in err
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]
    assert differences(saved(command(data, tmp_path)), whole_saved) == []
    assert result == whole_result


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        "--capacity 2000 --admission count:2",
        "--capacity 2000 --eviction lru --admission chance:0.5",
        "--capacity 2000 --eviction none --admission sketch:2:64KB",
    ],
)
def test_interrupted_while_ids_come_and_go(data, tmp_path, capsys, ctrl_c_after_a_save, options):
    def run(out: Path, *more: str) -> tuple[dict[str, Any], Saved]:
        arguments = [str(data), "--out", str(out), "--no-baseline", "--threads", "1"]
        arguments += ["--batch-size", str(BATCH), "--checkpoint-every", "20", *options.split()]
        train.main([*arguments, *more])
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        del result["samples_per_s"]
        return result, saved(arguments)

    threads = torch.get_num_threads()
    expected, expected_saved = run(tmp_path / "whole")
    assert expected["evicted"] + expected["rejected"] > 0
    assert expected["not_admitted"] > 0
    with ctrl_c_after_a_save():
        run(tmp_path / "interrupted", "--async-checkpoint")
    told = f"interrupted; --resume goes on after line {20 * BATCH} from "
    assert told in capsys.readouterr().err
    result, resumed = run(tmp_path / "interrupted", "--resume")
    torch.set_num_threads(threads)
    assert result == expected
    assert differences(resumed, expected_saved) == []


def test_resume_with_another_life_cycle_is_refused(data, tmp_path):
    arguments = [str(data), "--out", str(tmp_path), "--samples", "500", "--no-baseline"]
    train.main([*arguments, "--capacity", "2000"])
    with pytest.raises(SystemExit) as caught:
        train.main([*arguments, "--eviction", "lru", "--capacity", "99", "--resume"])
    assert "--capacity: 2000 in the checkpoint, 99 now" in caught.value.code
    assert "--eviction: 'lfu' in the checkpoint, 'lru' now" in caught.value.code
    with pytest.raises(SystemExit) as caught:
        train.main([*arguments, "--capacity", "2000", "--admission", "count:2", "--resume"])
    assert "--admission: None in the checkpoint, 'count:2' now" in caught.value.code


def test_comparison_sees_a_flipped_bit(whole):
    """Otherwise the test above would prove little."""
    _, state = whole
    chance = random.Random(1)
    other = copy.deepcopy(state)
    filled = [tensor for tensor in tensors(other) if tensor.numel()]
    for tensor in chance.sample(filled, 25):
        content = raw(tensor)
        byte, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        content[byte] ^= bit
        assert len(differences(state, other)) == 1
        content[byte] ^= bit
    assert differences(state, other) == []


# -- what is refused on resume ---------------------------------------------------------------------


def refused(arguments: list[str]) -> str:
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as caught:
        train.main(arguments)
    torch.set_num_threads(threads)
    assert isinstance(caught.value.code, str)
    return caught.value.code


@pytest.mark.parametrize(
    ("of", "damage"),
    [
        ("manifest.json", "flipped bit"),
        ("manifest.json", "cut off"),
        ("manifest.json", "missing"),
        ("*/state/*", "flipped bit"),
        ("*/dense/*", "missing"),
        ("*/groups/*", "cut off"),
        ("*/rows.tables.category_7/*", "flipped bit"),
    ],
)
def test_damaged_checkpoint_is_refused(data, whole, whole_out, tmp_path, of, damage):
    path = tmp_path / "checkpoint"
    shutil.copytree(whole_out / "checkpoint", path)
    (file,) = path.glob(of)
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "cut off":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    message = refused([*command(data, tmp_path), "--resume"])
    if (of, damage) == ("manifest.json", "missing"):
        assert message == f"error: {path} {NOT_OURS}"
    else:
        assert message.startswith(f"error: {file}: ")
        assert message.endswith(f"; remove {path} and start without --resume")


NOT_OURS = (
    "is not a checkpoint of this version of the program: resume with the version that wrote it, or "
    "remove it"
)


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_what_is_no_checkpoint_is_not_replaced(data, tmp_path, more):
    """Such as the folder that earlier versions of the job wrote."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    (path / "job.pt").write_bytes(b"DLRM-CK1")
    assert refused([*command(data, tmp_path), *more]) == f"error: {path} {NOT_OURS}"
    assert list(tmp_path.rglob("*")) == [path, path / "job.pt"]
