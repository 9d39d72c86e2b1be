"""Models in loops of PyTorch, TorchRec and the frameworks that ``make programs`` fetches."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fetch import DONE, FOLDER, PYTHON, RANKING_DONE, RANKING_PYTHON, RAY_PYTHON

pytestmark = [pytest.mark.cpu_only("programs, in processes of their own"), pytest.mark.long]
fetched = pytest.mark.skipif(
    not DONE.exists(), reason=f"{FOLDER} is missing: make programs fetches it"
)
ranking = pytest.mark.skipif(
    not RANKING_DONE.exists(), reason=f"{RANKING_DONE} is missing: make programs fetches it"
)

HERE = Path(__file__).parent
HANGS_S = 1200  # the longest program takes 70 s of an idle core
# test files of TorchRec name a backend alone
BASES_OF_TORCHREC = """
from torchrec.distributed.test_utils import test_model_parallel, test_model_parallel_base

class Shardings(test_model_parallel._ModelParallelBase):
    backend = "nccl"

class StateDicts(test_model_parallel_base.ModelParallelStateDictBase):
    backend = "gloo"
"""


def run(folder: Path, *command: str, ranks: int = 1, python: Path = PYTHON) -> str:
    """Run a program on so many ranks; return what it prints."""
    several = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    done = subprocess.run(
        [
            str(python if DONE.exists() else sys.executable),
            *(several if ranks > 1 else ()),
            *command,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def results(
    folder: Path, program: str, *arguments: str, ranks: int = 1, python: Path = PYTHON
) -> list[dict[str, Any]]:
    """Run a program; return what each rank prints last, by rank where there are several."""
    output = run(folder, str(HERE / program), *arguments, ranks=ranks, python=python)
    printed = re.findall(r"\{.*?\}", output)  # torchrun may put two on one line
    return sorted(map(json.loads, printed[-ranks:]), key=lambda of: of.get("rank", 0))


@fetched
@pytest.mark.parametrize("model", ["BPR", "SASRec"])
def test_recbole_recalls_as_with_static_tables(tmp_path: Path, model: str) -> None:
    static, dynamic = (
        results(tmp_path, "recbole_run.py", model, kind)[0] for kind in ("static", "dynamic")
    )
    for metric in ("recall@10", "recall@20"):
        assert dynamic[metric] > 0.95 * static[metric], (static, dynamic)


@fetched
def test_deepfm_is_as_good_as_with_static_tables(tmp_path: Path) -> None:
    found = results(tmp_path, "deepfm_run.py", "3")[0]
    static, dynamic = (sum(found[kind]) / 3 for kind in ("static", "dynamic"))
    assert dynamic > static - 0.003, found


@ranking
def test_fuxictr_is_as_good_as_with_static_tables(tmp_path: Path) -> None:
    found = results(tmp_path, "fuxictr_run.py", "DeepFM", "3", python=RANKING_PYTHON)[0]
    static, dynamic = (sum(found[kind]) / 3 for kind in ("static", "dynamic"))
    assert dynamic > static - 0.003, found


@ranking
@pytest.mark.parametrize(
    ("model", "tables", "within"),
    [
        ("DeepFM", "dynamic", 0.003),
        ("DeepFM", "dynamicemb", 0.003),
        # TorchEasyRec trains the static table of its histories with Adam, and a dynamic one as all
        # other tables, with Adagrad
        ("MultiTowerDIN", "dynamic", 0.006),
    ],
)
def test_torcheasyrec_is_as_good_as_with_static_tables(
    tmp_path: Path, model: str, tables: str, within: float
) -> None:
    static, dynamic = (
        results(tmp_path, "torcheasyrec_run.py", model, kind, "3", python=RANKING_PYTHON)[0]["auc"]
        for kind in ("static", tables)
    )
    assert sum(of[-2] for of in dynamic) / 3 > sum(of[-2] for of in static) / 3 - within
    # a new model that has loaded the last checkpoint
    assert all(of[-1] == of[-2] for of in dynamic), dynamic


@fetched
def test_default_rows_recall_as_the_best_of_static_tables(tmp_path: Path) -> None:
    found = results(tmp_path, "two_tower_run.py", "2", "Adam")[0]
    means = {name: sum(of) / len(of) for name, of in found.items() if name != "optimizer"}
    dynamic = means.pop("dynamic, default")
    assert dynamic > 0.98 * max(means.values()), found


def programs_of_the_guide() -> dict[str, str]:
    """Programs of the guide that need another package, by its name."""
    page = HERE.parents[1] / "tutorials/guides/frameworks.md"
    found = re.findall(r"^```python\n(# needs (\w+)\n.*?)^```$", page.read_text(), re.M | re.S)
    return {package: program for program, package in found}


@fetched
@pytest.mark.parametrize("package", programs_of_the_guide())
def test_the_programs_of_the_guide_run(tmp_path: Path, package: str) -> None:
    (tmp_path / "program.py").write_text(programs_of_the_guide()[package])
    python = RAY_PYTHON if package == "ray" else PYTHON
    printed = run(tmp_path, str(tmp_path / "program.py"), python=python).splitlines()
    if package == "ray":
        assert "None" in printed, printed  # no error
    else:
        assert printed[-1].endswith(" ids"), printed


@fetched
@pytest.mark.parametrize("name", ["lightning", "lightning-ddp", "trainer"])
def test_a_framework_trains_the_rows(tmp_path: Path, name: str) -> None:
    trained = results(tmp_path, "frameworks_run.py", name)[0]
    assert trained["loss"] < 0.3  # 0.69 at the beginning
    # a rank of two has about half of the ids
    assert (150 < trained["ids"] < 325) if name == "lightning-ddp" else trained["ids"] > 450


@fetched
def test_accelerate_saves_the_rows_of_all_ranks(tmp_path: Path) -> None:
    saved = results(tmp_path, "frameworks_run.py", "accelerate", "last", ranks=2)
    assert saved[0]["loss"] < 0.3
    for ranks in (2, 1):
        loaded = results(tmp_path, "frameworks_run.py", "accelerate-load", "last", ranks=ranks)
        assert all(of["loss"] == pytest.approx(saved[0]["loss"], rel=1e-4) for of in loaded)
        assert sum(of["ids"] for of in loaded) == sum(of["ids"] for of in saved) > 450


@fetched
def test_accelerate_alone_saves_nothing(tmp_path: Path) -> None:
    for of in results(tmp_path, "frameworks_run.py", "accelerate-alone", "last", ranks=2):
        assert "call torch_dynemb.checkpoint.save_with(accelerator)" in of["error"]
        assert of["models"] == 0


@fetched
def test_lightning_s_own_checkpoint_is_refused(tmp_path: Path) -> None:
    found = results(tmp_path, "frameworks_run.py", "lightning-checkpoint")[0]
    assert "give the Trainer enable_checkpointing=False" in found["error"]


def test_fsdp2_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    saved = results(tmp_path, "fsdp2_run.py", "save", "last", ranks=2)
    assert results(tmp_path, "fsdp2_run.py", "load", "last", ranks=2) == saved
    assert saved[0]["loss"] < 0.3


def test_dlrm_of_torchrec_learns_raw_ids(tmp_path: Path) -> None:
    static, dynamic = (
        results(tmp_path, "dlrm_run.py", kind, ranks=2) for kind in ("static", "dynamic")
    )
    for of_rank, without_collisions in zip(static, dynamic, strict=True):
        assert without_collisions["auc"] > of_rank["auc"] + 0.02  # 0.923 and 0.870
        assert without_collisions["ids"] == 2000


@pytest.mark.parametrize("tables", ["static", "dynamic"])
def test_tests_of_torchrec_run_with_other_tables(tmp_path: Path, tables: str) -> None:
    folder = tmp_path / "torchrec" / "distributed" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_sequence_model.py").write_text("class TestEmbeddingCollectionSharder: ...\n")
    (folder / "test_bases.py").write_text(BASES_OF_TORCHREC)
    wanted = ["prefix", "test_sharding_rw", "params_and_buffers"]
    command = [str(HERE / "torchrec_tests.py"), str(tmp_path), tables, *wanted, "--json", "of.json"]
    if tables == "static":
        run(tmp_path, *command)
    else:
        with pytest.raises(AssertionError):  # the program reports a failure to its caller
            run(tmp_path, *command)
    found = json.loads((tmp_path / "of.json").read_text())
    outcomes = {name.rpartition(".")[2]: of["outcome"] for name, of in found.items()}
    assert outcomes == {
        "test_load_state_dict_prefix": "passed",
        "test_sharding_rw": "passed",
        # a dynamic table has more entries in state_dict() than parameters
        "test_params_and_buffers": "passed" if tables == "static" else "failed",
    }
    assert tables == "static" or "weight_id" in found[next(reversed(found))]["why"]
