"""Killed again and again, a training run of the DLRM tutorial ends as if nothing had happened."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tutorials.dlrm import checkpoint, train
from tutorials.dlrm.generate import generate
from tutorials.dlrm.planted import PlantedConfig

pytestmark = pytest.mark.cpu_only("the job of a tutorial, on the CPU")

ROOT = Path(__file__).resolve().parents[2]
BATCH = 200
STEPS = 45
EVERY = 3  # steps between checkpoints
MULTIPLIERS = {"": 1, "k": 1000}


def start(data: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    out.mkdir(exist_ok=True)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tutorials.dlrm.train", data, "--out", out, "--no-baseline"),
            *("--batch-size", str(BATCH), "--checkpoint-every", str(EVERY), "--log-every", "4"),
            *("--threads", "2", "--progress-interval", "0", *options),
        ],
        cwd=ROOT,
        # Threads that wait do not spin: other tests may be using the cores.
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


def samples_shown(process: subprocess.Popen[str]) -> Iterator[float]:
    """Yield what the progress bar says, as it says it."""
    assert process.stderr is not None
    shown = ""
    while character := process.stderr.read(1):
        shown += character
        if match := re.search(r"([\d.]+)([k]?)/[\d.]+k \[", shown):
            yield float(match[1]) * MULTIPLIERS[match[2]]
            shown = ""


def kill_at(process: subprocess.Popen[str], samples: float) -> None:
    for shown in samples_shown(process):
        if shown >= samples:
            process.kill()
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def kill_while_writing(process: subprocess.Popen[str], unfinished: Path) -> None:
    """Stop the process when the file appears; kill it if the file is still there then."""
    while process.poll() is None:
        if not unfinished.exists():
            os.sched_yield()
            continue
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # returns once it has stopped
        if unfinished.exists():
            process.kill()
            break
        process.send_signal(signal.SIGCONT)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "no checkpoint was written slowly enough"
    assert unfinished.exists()


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
def whole(data, tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Result and final state of a run that is left alone."""
    out = tmp_path_factory.mktemp("whole")
    result, _ = finish(start(data, out))
    state = checkpoint.load(out / "checkpoint.pt")
    del state["seconds"], result["samples_per_s"]
    return result, state


@pytest.mark.parametrize("kills", [2, pytest.param(5, marks=pytest.mark.long)])
def test_killed_and_resumed(data, whole, tmp_path, kills):
    whole_result, whole_state = whole
    path = tmp_path / "checkpoint.pt"
    unfinished = checkpoint.unfinished(path)
    chance = random.Random(0)
    lines_before = 0
    for attempt in range(kills):
        process = start(data, tmp_path, *(["--resume"] if attempt else []))
        if attempt in (1, 3):
            unfinished.unlink(missing_ok=True)
            kill_while_writing(process, unfinished)
        else:
            steps_before = lines_before // BATCH
            last = steps_before + (STEPS - steps_before) // 2
            kill_at(process, BATCH * chance.randint(steps_before + 1, last))
        if path.exists():
            state = checkpoint.load(path)
            lines = state["position"][3]
            assert lines >= lines_before
            assert lines % (BATCH * EVERY) == 0 or lines == STEPS * BATCH
            lines_before = lines
    assert lines_before > 0
    result, err = finish(start(data, tmp_path, "--resume"))
    assert f"resuming after line {lines_before} " in err
    state = checkpoint.load(path)
    del state["seconds"], result["samples_per_s"]
    assert not unfinished.exists()
    assert differences(state, whole_state) == []
    assert result == whole_result


@pytest.mark.parametrize(
    "options",
    [
        "--capacity 2000 --admission count:2",
        "--capacity 2000 --eviction lru --admission chance:0.5",
        "--capacity 2000 --eviction none --admission sketch:2:64KB",
    ],
)
def test_interrupted_while_ids_come_and_go(data, tmp_path, capsys, monkeypatch, options):
    def save_and_stop(path: Path, state: dict[str, Any]) -> None:
        save(path, state)
        raise KeyboardInterrupt

    def run(out: Path, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
        arguments = [str(data), "--out", str(out), "--no-baseline", "--threads", "1"]
        sizes = ["--batch-size", str(BATCH), "--checkpoint-every", "20"]
        train.main([*arguments, *sizes, *options.split(), *more])
        state = checkpoint.load(out / "checkpoint.pt")
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        del state["seconds"], result["samples_per_s"]
        return result, state

    threads = torch.get_num_threads()
    expected, expected_state = run(tmp_path / "whole")
    assert expected["evicted"] + expected["rejected"] > 0
    assert expected["not_admitted"] > 0
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "interrupted")
    monkeypatch.setattr(checkpoint, "save", save)
    result, state = run(tmp_path / "interrupted", "--resume")
    torch.set_num_threads(threads)
    assert result == expected
    assert differences(state, expected_state) == []


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


def test_corrupted_checkpoint_is_refused_on_resume(data, whole, tmp_path):
    _, state = whole
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(path, state | {"seconds": 1.0})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        train.main([str(data), "--out", str(tmp_path), "--threads", "1", "--resume"])
    assert caught.value.code == (
        f"error: {path} is corrupted: its SHA-256 digest is not the one written with it; "
        "delete it and start without --resume"
    )
