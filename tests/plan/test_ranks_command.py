"""``plan --ranks A,B --link RATE``: its report, its options, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from torch_dynemb.__main__ import main
from torch_dynemb.plan.ranks.grammar import parse_rate, parse_time, rank_counts
from torch_dynemb.plan.ranks.op_costs import MEASURED

pytestmark = pytest.mark.cpu_only("a program that reads files")

ASKED = ("--dim", 8, "--ranks", "2,16", "--link", "400Gb", "--batch", 4096)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "ids.txt"
    path.write_text("".join(f"{(n * n) % 211 - 100}\n" for n in range(1000)))
    return path


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    status: object
    try:
        status = main(["plan", *map(str, arguments)])
    except SystemExit as end:
        status = end.code
    reply = capsys.readouterr()
    assert status in (1, 2)
    assert reply.out == ""
    assert reply.err.startswith("error: ")
    assert reply.err.count("\n") == 1
    return reply.err


def test_the_report_has_the_figures(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = json.loads(planned(capsys, sample, *ASKED, "--json"))["scale"]
    assert (model["ranks"], model["batch"], model["ranks_per_node"]) == ([2, 16], 4096, 8)
    assert model["link_bytes_per_second"] == model["node_link_bytes_per_second"] == 5e10
    compared = {case["ranks"] for case in model["cases"]}
    assert compared == {2, 4, 8, 16}  # doublings show where more ranks stop paying
    assert len(model["cases"]) == 4 * 8
    assert len(model["pays_up_to"]) == 8
    text = planned(capsys, sample, *ASKED)
    assert "Step of 4,096 lines on 2 ranks" in text
    assert "Step of 4,096 lines on 16 ranks" in text
    assert "on 4 ranks" not in text
    assert MEASURED.source in text
    for case in model["cases"]:
        if case["ranks"] in model["ranks"]:
            assert f"{1e3 * case['seconds']['step']:.3g} ms" in text
    assert max(map(len, text.splitlines())) < 200
    rates = planned(capsys, sample, *ASKED, "--steps-per-second")
    for case in model["cases"]:
        if case["ranks"] in model["ranks"]:
            assert f"{1 / case['seconds']['step']:.3g}" in rates
    assert "steps a second" in rates
    assert "steps a second" not in text
    assert "are extrapolated" in text  # from 1,000 lines to 4,096
    fewer = planned(capsys, sample, "--dim", 8, "--ranks", 4, "--link", "1Gb", "--batch", 1000)
    assert "are extrapolated" not in fewer


def test_the_rest_of_the_plan_is_for_the_smallest_number(
    sample: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = json.loads(planned(capsys, sample, *ASKED, "--json"))
    one = json.loads(planned(capsys, sample, "--dim", 8, "--ranks", 2, "--json"))
    assert one["scale"] is None
    assert several | {"scale": None} == one


def test_options_of_the_cluster(
    sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def seconds(*options: object) -> dict[str, Any]:
        model = json.loads(planned(capsys, sample, *ASKED, *options, "--json"))["scale"]
        (case,) = (
            case
            for case in model["cases"]
            if (case["sharding"], case["dedup"], case["ranks"]) == ("row_wise", False, 16)
        )
        result: dict[str, Any] = case["seconds"]
        return result

    plain = seconds()
    assert seconds("--latency", "1ms")["links"] > 0.05
    assert seconds("--node-link", "1Mb")["links"] > plain["links"]
    assert 1.5 < seconds("--cores", 4)["own_work"] / plain["own_work"] <= 2
    one_node = ("--ranks-per-node", 16)
    assert seconds(*one_node, "--link", "1Mb", "--node-link", "400Gb") == seconds(*one_node)
    costs = asdict(MEASURED) | {name: 0 for name in asdict(MEASURED) if name.endswith("_ns")}
    (tmp_path / "costs.json").write_text(json.dumps(costs | {"step_us": 7, "source": "mine"}))
    assert seconds("--costs", tmp_path / "costs.json")["own_work"] == pytest.approx(7e-6)
    text = planned(capsys, sample, *ASKED, "--costs", tmp_path / "costs.json")
    assert "costs of mine" in text


def test_columns_of_a_shard(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shards(*options: object) -> dict[str, int]:
        model = json.loads(planned(capsys, sample, *ASKED, *options, "--json"))["scale"]
        cases = [case for case in model["cases"] if case["ranks"] == 16]
        return {case["sharding"]: case["column_shards"] for case in cases}

    assert shards()["column_wise"] == shards()["grid_shard"] == 2
    assert shards("--min-columns", 2)["table_column_wise"] == 4
    assert shards("--min-columns", 2)["grid_shard"] == 2  # there are two nodes
    assert shards("--min-columns", 8)["column_wise"] == 1


def test_a_plot(sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    planned(capsys, sample, *ASKED, "--plot", tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").read_bytes().startswith(b"\x89PNG")
    both = refused(capsys, sample, *ASKED, "--replay", "--plot", tmp_path / "both.png")
    assert "leave --replay or --link out" in both


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "0", *ASKED[4:]], "'0' is not a number of at least 1"),
        (["--ranks", "8,x", *ASKED[4:]], "'x' is not a number of at least 1: write 8, or a list"),
        (["--ranks", "8,-1", *ASKED[4:]], "'-1' is not a number of at least 1"),
        (["--ranks", "8,8", *ASKED[4:]], "'8,8' repeats a number: give every number once"),
        (["--ranks", "8,12", "--link", "1Gb", "--batch", 96], "do not fill nodes of 8 ranks"),
        (["--ranks", "8,64"], "--ranks is 8,64: add --link and --batch"),
        (["--ranks", "8", "--batch", "80"], "--batch is about links of ranks: add --link"),
        (["--steps-per-second"], "--steps-per-second is about links of ranks: add --link"),
        (["--ranks", "8", "--link", "1Gb"], "--link needs --batch"),
        (["--ranks", "8", "--link", "1Gb", "--batch", "81"], "which 8 ranks cannot share evenly"),
        (["--ranks", "8", "--link", "1Gb", "--batch", "4"], "give a multiple of 8 lines"),
        (["--ranks", "8", "--link", "1Gb", "--batch", "0"], "'0' is not a number of at least 1"),
        ([*ASKED[2:4], "--link", "400", "--batch", 64], "--link is '400', expected bits or bytes"),
        ([*ASKED[2:4], "--link", "0Gb", "--batch", 64], "--link is '0Gb', expected bits or bytes"),
        ([*ASKED[2:], "--node-link", "9 apples"], "--node-link is '9 apples', expected bits"),
        ([*ASKED[2:], "--latency", "2"], "--latency is '2', expected a time such as 2us"),
        ([*ASKED[2:], "--cores", "0"], "'0' is not a number of at least 1"),
        ([*ASKED[2:], "--min-columns", "9"], "--min-columns is 9, but rows have --dim 8 columns"),
        ([*ASKED[2:], "--costs", "no.json"], "--costs is no.json, which is not a file"),
    ],
)
def test_wrong_options(
    sample: Path, capsys: pytest.CaptureFixture[str], options: list[object], said: str
) -> None:
    assert said in refused(capsys, sample, "--dim", 8, *options)


def test_a_missing_dim(sample: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--dim" in refused(capsys, sample, *ASKED[2:])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "which is not JSON"),
        ("[]", "expected an object with step_us, ids_sent_ns"),
        ("{}", "expected an object with step_us, ids_sent_ns"),
        (json.dumps(asdict(MEASURED) | {"step_us": -1}), "step_us in"),
        (json.dumps(asdict(MEASURED) | {"lengths_ns": "1"}), "expected a number from 0 on"),
        (json.dumps(asdict(MEASURED) | {"lengths_ns": True}), "expected a number from 0 on"),
        (json.dumps(asdict(MEASURED) | {"more": 1}), "expected an object with"),
    ],
)
def test_wrong_costs(
    sample: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    (tmp_path / "costs.json").write_text(content)
    reply = refused(capsys, sample, *ASKED, "--costs", tmp_path / "costs.json")
    assert said in reply
    assert str(tmp_path / "costs.json") in reply


def test_numbers_with_units() -> None:
    assert rank_counts("64, 8") == [8, 64]
    rates = {
        "400Gb": 5e10,
        "50 GB/s": 5e10,
        "1.5Mb": 187500.0,
        "8b": 1.0,
        "2TB": 2e12,
        "9Kbps": 1125,
    }
    for text, rate in rates.items():
        assert parse_rate("--link", text) == rate
    times = {"2us": 2e-6, "1.5 ms": 1.5e-3, "30ns": 3e-8, "1s": 1.0, "0us": 0.0}
    for text, seconds in times.items():
        assert parse_time("--latency", text) == pytest.approx(seconds)
    for text in ("400gb", "GB", "-1Gb", "1e3Gb", "1 Gb / s", ""):
        with pytest.raises(ValueError, match="expected bits or bytes a second"):
            parse_rate("--link", text)
    for text in ("2", "us", "-2us", "2 min", ""):
        with pytest.raises(ValueError, match="expected a time"):
            parse_time("--latency", text)
