"""The library gives the bits of golden_outputs.txt; see outputs.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import outputs
import pytest
import torch
import trained_cases
from contents import Outputs
from execution import simd, simd_levels, threads
from torch import Tensor

from torch_dynemb import optim
from torch_dynemb.optim import OptimizerConfig

pytestmark = pytest.mark.cpu_only("bits of the CPU's kernels")

CASES = outputs.cases()
RANK_CASES = outputs.rank_cases()


@pytest.fixture(scope="module")
def golden() -> dict[str, str]:
    return outputs.read_golden()


def check(found: dict[str, str], golden: dict[str, str]) -> None:
    lines = outputs.differences(found, golden)
    assert not lines, "\n".join([*lines, outputs.HOW_TO_WRITE])


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_file(name: str, golden: dict[str, str]) -> None:
    with threads(2):
        check(outputs.digests(name, outputs.run(CASES[name])), golden)


@pytest.mark.long
@pytest.mark.parametrize("level", range(3))
def test_order_threads_and_instruction_sets_do_not_matter(
    level: int, golden: dict[str, str]
) -> None:
    if level not in simd_levels():
        pytest.skip(f"this processor has no level {level}")
    found: dict[str, str] = {}
    with threads(1), simd(level):
        for name in reversed(CASES):
            found.update(outputs.digests(name, outputs.run(CASES[name])))
    check(found, golden)


@pytest.mark.long
@pytest.mark.parametrize("name", RANK_CASES)
def test_outputs_of_ranks_are_those_of_the_file(name: str, golden: dict[str, str]) -> None:
    check(outputs.digests(name, outputs.run(RANK_CASES[name])), golden)


def test_the_file_has_lines_of_all_cases_and_no_others(golden: dict[str, str]) -> None:
    known = {outputs.case_of(name) for name in golden}
    assert known == {*CASES, *RANK_CASES}, outputs.HOW_TO_WRITE


def test_every_optimizer_is_trained() -> None:
    exported = {getattr(optim, name) for name in optim.__all__}
    configs = {
        of
        for of in exported
        if isinstance(of, type) and issubclass(of, OptimizerConfig) and of is not OptimizerConfig
    }
    for column in zip(*trained_cases.OPTIMIZERS.values(), strict=True):
        assert {type(config) for config in column} == configs


# -- what the comparison finds ---------------------------------------------------------------------

CASE = "train adam fp32"


def altered(tensor: Tensor) -> Tensor:
    """Copy a tensor, but for the lowest bit of its last element."""
    copy = tensor.clone()
    copy.reshape(-1)[-1:].view(torch.uint8)[0] ^= 1
    return copy


def tensors_of(found: Outputs) -> dict[str, dict[str, Tensor]]:
    return {name: {"": of} if isinstance(of, Tensor) else dict(of) for name, of in found.items()}


def test_every_changed_bit_is_found_and_named(golden: dict[str, str]) -> None:
    found = outputs.run(CASES[CASE])
    count = 0
    for output, named in tensors_of(found).items():
        for part, tensor in named.items():
            changed = altered(tensor)
            assert changed.shape == tensor.shape
            other = {**found, output: {**named, part: changed} if part else changed}
            digests = outputs.digests(CASE, other)
            assert outputs.differences(digests, golden) == [f"{CASE}: {output}: has other bits"]
            count += 1
    assert count > 10


def test_names_dtypes_and_shapes_are_part_of_an_output() -> None:
    rows = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    digests = {
        outputs.digest(of)
        for of in (
            rows,
            rows.T,
            rows.reshape(3, 2),
            rows.view(torch.float32),
            {"rows": rows},
            {"rows": rows[:1], "more": rows[1:]},
            {"more": rows[:1], "rows": rows[1:]},
        )
    }
    assert len(digests) == 7


def test_another_result_of_the_library_is_found(golden: dict[str, str]) -> None:
    """An epsilon of the optimizer that changes last bits alone."""
    plain, _ = trained_cases.OPTIMIZERS["adam"]
    other = dataclasses.replace(plain, eps=1.5e-8)  # type: ignore[call-arg]
    found = trained_cases.fused(other, torch.float32, Path())
    lines = outputs.differences(outputs.digests(CASE, found), golden)
    assert lines == [f"{CASE}: outputs: has other bits", f"{CASE}: rows: has other bits"]


def test_outputs_that_come_and_go_are_named() -> None:
    file = {"a: x": "1", "a: y": "2", "b: x": "3"}
    assert outputs.differences({"a: x": "1", "a: y": "2"}, file) == []
    assert outputs.differences({"a: x": "1", "a: z": "2"}, file) == [
        "a: y: is in the file and not computed",
        "a: z: is not in the file",
    ]


def test_a_difference_says_how_to_write_the_file(golden: dict[str, str]) -> None:
    found = outputs.digests(CASE, outputs.run(CASES[CASE]))
    name = f"{CASE}: rows"
    with pytest.raises(AssertionError) as raised:
        check({**found, name: "0"}, golden)
    assert f"{name}: has other bits" in str(raised.value)
    assert "python tests/golden/outputs.py --write" in str(raised.value)


def test_cases_that_did_not_run_keep_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    outputs.write({"a: x": "1", "b: x y": "2", "c: x": "3"}, ["a", "b", "c"], path)
    outputs.write({"a: z": "4"}, ["a", "b"], path)
    assert outputs.read_golden(path) == {"a: z": "4", "b: x y": "2"}
