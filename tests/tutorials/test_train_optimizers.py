"""Optimizers, dtypes and micro-batches in the DLRM tutorial: options, errors, results."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_dynemb as td
from tutorials.dlrm import options, train
from tutorials.dlrm.job import optimizers
from tutorials.dlrm.job.optimizers import OPTIMIZERS, row_optimizer, state_dtypes
from tutorials.dlrm.model import DynamicRows

pytestmark = [
    pytest.mark.cpu_only("the job of a tutorial, on the CPU"),
    pytest.mark.usefixtures("same_threads_afterwards", "no_report"),
]

DIM = 4
SMALL = ["--samples", "3000", "--batch-size", "256", "--embedding-dim", str(DIM), "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("optimizers")


def run(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    folders = ["--samples-folder", str(folder / "samples"), "--out", str(folder / "out")]
    train.main([*SMALL, *folders, "--no-baseline", *arguments])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    del result["samples_per_s"]
    return result


def state_bytes(name: str, state_dtype: str) -> int:
    """Of a row: what the documentation says."""
    config = OPTIMIZERS[name](0.1)
    of_tensor = {"float32": 4 * DIM, "bfloat16": 2 * DIM, "uint8": DIM + 4}[state_dtype]
    counters = 1 if isinstance(config, td.SmartDecayAdam | td.RowWiseRMSprop) else 0
    per_row = len(type(config).row_state) + counters
    return len(type(config).element_state) * of_tensor + 4 * per_row


# -- options ---------------------------------------------------------------------------------------


def test_a_run_is_not_resumed_with_others():
    settings = options.settings_of_job(options.parse([]))
    expected = {
        "--optimizer": "rowwise-adagrad",
        "--row-dtype": "float32",
        "--state-dtype": "float32",
        "--rounding": "stochastic",
        "--accumulate": 1,
    }
    assert {name: settings[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--optimizer adamax", "--optimizer: invalid choice: 'adamax'"),
        ("--row-dtype float64", "--row-dtype: invalid choice: 'float64'"),
        ("--state-dtype float16", "--state-dtype: invalid choice: 'float16'"),
        ("--rounding up", "--rounding: invalid choice: 'up'"),
        ("--accumulate 0", "--accumulate: expected an integer from 1 on, got '0'"),
    ],
)
def test_unknown_values_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        options.parse(arguments.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--no-baseline --optimizer sgd --state-dtype uint8",
            "error: --state-dtype uint8: sgd has no state of this kind; use --state-dtype float32, "
            "or one of adam, adamw,",
        ),
        (
            "--no-baseline --state-dtype bfloat16",
            "error: --state-dtype bfloat16: rowwise-adagrad has no state of this kind; use "
            "--state-dtype float32, or one of momentum-sgd,",
        ),
        (
            "--no-baseline --optimizer ftrl --state-dtype uint8",
            "error: --state-dtype uint8: ftrl has no",
        ),
        *(
            (
                arguments,
                f"error: {named}: the hashed tables of the baseline have float32 rows and row-wise "
                "Adagrad in every batch; add --no-baseline",
            )
            for arguments, named in (
                ("--optimizer adam", "--optimizer adam"),
                ("--row-dtype float16", "--row-dtype float16"),
                ("--accumulate 2", "--accumulate"),
            )
        ),
    ],
)
def test_combinations_that_do_not_exist_are_refused(tmp_path, arguments, message):
    with pytest.raises(SystemExit) as caught:
        train.main([*SMALL, *arguments.split(), "--out", str(tmp_path)])
    assert isinstance(caught.value.code, str)
    assert caught.value.code.startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_every_optimizer_of_the_library_has_a_name():
    assert doctest.testmod(optimizers).failed == 0
    made = {type(make(0.5)) for make in OPTIMIZERS.values()}
    assert len(made) == len(OPTIMIZERS)
    exported = [getattr(td, name) for name in td.__all__]
    kinds = [x for x in exported if isinstance(x, type) and issubclass(x, td.optim.OptimizerConfig)]
    assert made == set(kinds)
    assert all(make(0.5).lr == 0.5 for make in OPTIMIZERS.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dtypes_are_those_of_the_library(name):
    for dtype in ("float32", "bfloat16", "uint8"):
        opts = options.parse(["--no-baseline", "--optimizer", name, "--state-dtype", dtype])
        if dtype in state_dtypes(name):
            state = row_optimizer(opts).state
            assert sum(tensor.row_bytes(DIM) for tensor in state) == state_bytes(name, dtype)
        else:
            with pytest.raises(ValueError, match=f"--state-dtype {dtype}: {name} has no state"):
                row_optimizer(opts)


def test_the_tables_are_what_the_options_say():
    arguments = "--no-baseline --optimizer adamw --row-dtype float16 --state-dtype bfloat16"
    arguments += " --rounding nearest --accumulate 2 --lr 0.1"
    rows = train.make_rows(options.parse(arguments.split()), train.Data([], 2, 1, None))
    config = rows.tables.group.config.optimizer
    assert config == td.AdamW(0.1, state_dtype=torch.bfloat16, stochastic_rounding=False)
    assert {table.dtype for table in rows.tables.group.config.tables} == {torch.float16}
    assert isinstance(rows.optimizer(), td.SplitOptimizer)
    assert not isinstance(DynamicRows(DIM, config).optimizer(), td.SplitOptimizer)


# -- from the command line to the result -----------------------------------------------------------


@pytest.fixture(scope="module")
def default(folder) -> dict[str, Any]:
    folders = ["--samples-folder", str(folder / "samples"), "--out", str(folder / "default")]
    threads = torch.get_num_threads()
    result = train.run(options.parse([*SMALL, *folders, "--no-baseline"]))
    torch.set_num_threads(threads)
    return result


@pytest.mark.long
def test_every_optimizer_trains(folder, capsys, default):
    aucs = set()
    for name in OPTIMIZERS:
        result = run(folder, capsys, "--optimizer", name, "--lr", "0.01")
        assert result["optimizer"] == name
        assert (result["row_dtype"], result["state_dtype"]) == ("float32", "float32")
        assert result["ids"] == default["ids"]
        extra = state_bytes(name, "float32") - state_bytes("rowwise-adagrad", "float32")
        assert result["table_bytes"] == default["table_bytes"] + extra * default["ids"]
        aucs.add(result["auc"])
    assert len(aucs) > len(OPTIMIZERS) // 2  # with few steps and no decay some are nearly the same


def test_dtypes_take_the_bytes_that_they_should(folder, capsys, default):
    ids = default["ids"]
    plain = default["table_bytes"] - 4 * ids  # without row-wise Adagrad's sum
    for name, row_dtype, state_dtype in (
        ("rowwise-adagrad", "bfloat16", "float32"),
        ("rowwise-adagrad", "float16", "float32"),
        ("adagrad", "float32", "bfloat16"),
        ("adam", "bfloat16", "uint8"),
        ("partial-rowwise-adam", "float16", "bfloat16"),
    ):
        arguments = ["--optimizer", name, "--row-dtype", row_dtype, "--state-dtype", state_dtype]
        result = run(folder, capsys, *arguments, "--lr", "0.01")
        assert (result["optimizer"], result["row_dtype"], result["state_dtype"]) == (
            name,
            row_dtype,
            state_dtype,
        )
        fewer = 0 if row_dtype == "float32" else 2 * DIM
        assert result["table_bytes"] == plain + (state_bytes(name, state_dtype) - fewer) * ids


def test_rounding(folder, capsys, default):
    results = {
        rounding: run(folder, capsys, "--row-dtype", "bfloat16", "--rounding", rounding)
        for rounding in ("stochastic", "nearest")
    }
    assert results["stochastic"]["auc"] != results["nearest"]["auc"]
    again = run(folder, capsys, "--row-dtype", "bfloat16")
    assert again == results["stochastic"]  # the seed decides
    for name, result in results.items():
        assert result["rounding"] == name
        assert result["auc"] == pytest.approx(default["auc"], abs=0.02)


def test_micro_batches_make_the_same_steps(folder, capsys, default):
    # 2700 samples: the last batch has 140 of them, and 7 leaves a remainder
    for parts in (2, 7):
        result = run(folder, capsys, "--accumulate", str(parts))
        assert result["accumulate"] == parts
        assert result["auc"] == pytest.approx(default["auc"], abs=1e-3)
        for key in ("samples", "ids", "table_bytes"):
            assert result[key] == default[key]


def test_more_micro_batches_than_samples(folder, capsys):
    result = run(folder, capsys, "--accumulate", "16", "--samples", "12", "--optimizer", "adam")
    assert result["samples"] == 11


@pytest.mark.long
def test_resume_continues(folder, tmp_path, capsys, ctrl_c_after_a_save):
    arguments = ["--optimizer", "adam", "--row-dtype", "bfloat16", "--state-dtype", "uint8"]
    arguments += ["--lr", "0.01", "--accumulate", "2", "--checkpoint-every", "5"]
    expected = run(folder, capsys, *arguments)
    with ctrl_c_after_a_save():
        run(folder, capsys, *arguments, "--out", str(tmp_path))
    assert run(folder, capsys, *arguments, "--out", str(tmp_path), "--resume") == expected
    with pytest.raises(SystemExit) as caught:
        run(
            folder, capsys, *arguments, "--out", str(tmp_path), "--resume", "--optimizer", "amsgrad"
        )
    assert "--optimizer: 'adam' in the checkpoint, 'amsgrad' now" in caught.value.code
