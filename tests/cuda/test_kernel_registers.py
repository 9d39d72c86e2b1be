"""Registers of the kernels that take most of a training step: they bound the loads in flight."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.kernel_registers import Kernel, kernels_of

import setup

pytestmark = [pytest.mark.cpu_only("asks nvcc"), pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
# source -> kernels for rows of 4 columns a lane -> least warps of a multiprocessor, of 64
LEAST_WARPS = {
    "rows/lookup.cu": {"gather_rows<FloatReader, .*<4,": 16, "pool_bags<FloatReader, .*<4,": 24},
    "optimizer/part_1.cu": {"update_rows<.*true, .*<4,": 24, "update_rows<.*false, .*<4,": 16},
    "index/insert.cu": {"find_or_claim": 32},
    "index/eviction.cu": {"claim_victims": 40},
}


@pytest.mark.parametrize("source", LEAST_WARPS)
def test_warps_fit(source: str) -> None:
    if setup.find_cuda_root({"DYNEMB_CUDA": "1"}) is None:
        pytest.skip("no nvcc was found")
    kernels = kernels_of(ROOT / "csrc" / "cuda" / source)
    for name, least in LEAST_WARPS[source].items():
        found = [kernel for kernel in kernels if re.search(name, kernel.name)]
        assert found
        assert [kernel for kernel in found if kernel.warps < least] == []


def test_warps_of_registers() -> None:
    assert [Kernel("k", n, 0).warps for n in (32, 40, 80, 81, 128, 129)] == [64, 48, 24, 16, 16, 8]
