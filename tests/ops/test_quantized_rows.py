"""Quantized rows: FBGEMM's bytes, torch's floats of 8 bits, and rows that have no scale."""

from __future__ import annotations

import pytest
import torch
from execution import simd, simd_levels, threads
from group_calls import same_bits
from seeding import seeded
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import RowFormat
from torch_dynemb.ops.quantized import row_bytes

pytestmark = pytest.mark.any_device

FORMATS = [RowFormat.INT8, RowFormat.INT4, RowFormat.FLOAT8]
EVERY_FORMAT = pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])


def rows_of(dim: int, count: int = 300) -> Tensor:
    """Rows of many sizes, some of them equal, positive or nearly 0."""
    rows = torch.randn(count, dim, generator=seeded(dim)) * torch.logspace(-6, 3, count)[:, None]
    rows[3], rows[4], rows[5] = 0.1, 0.0, -0.3
    rows[6], rows[7], rows[8] = 1e-9 * rows[6], rows[7].abs(), 1e-5 * rows[8].sign()
    return rows.contiguous()


@pytest.mark.parametrize("dim", [4, 12, 16, 20, 64, 128, 200])
def test_int8_and_int4_have_the_bytes_of_fbgemm(dim: int) -> None:
    pytest.importorskip("fbgemm_gpu")
    rows = rows_of(dim)
    int8 = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows.cpu())
    int4 = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows.cpu(), 4)
    assert torch.equal(ops.quantize_rows(rows, RowFormat.INT8).cpu(), int8)
    assert torch.equal(ops.quantize_rows(rows, RowFormat.INT4).cpu(), int4)


@pytest.mark.parametrize("dim", [1, 7, 16, 33, 128])
def test_codes_of_fp8_are_floats_of_torch(dim: int) -> None:
    rows = rows_of(dim)
    packed = ops.quantize_rows(rows, RowFormat.FLOAT8)
    scale = packed[:, dim:].contiguous().view(torch.float32)
    codes = packed[:, :dim].contiguous().view(torch.float8_e4m3fn)
    expected = (rows * (1 / scale)).to(torch.float8_e4m3fn)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    # the largest of a row is its greatest code, but in rows that are nearly 0
    assert bool((codes.float().abs().amax(1) >= 447)[9:].all())
    assert same_bits(ops.dequantize_rows(packed, RowFormat.FLOAT8, dim), codes.float() * scale)


def test_every_code_of_fp8_has_the_value_that_torch_gives_it() -> None:
    codes = torch.arange(256).to(torch.uint8)
    scale = torch.tensor([2.0]).view(torch.uint8)
    packed = torch.cat([codes, scale])[None]
    values = ops.dequantize_rows(packed, RowFormat.FLOAT8, 256)[0]
    expected = codes.cpu().view(torch.float8_e4m3fn).float().to(values.device) * 2
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dim", [7, 8, 16, 37])
@pytest.mark.parametrize("others", [0x08, 0xF6])
def test_values_of_fp8_do_not_depend_on_the_codes_beside_them(others: int, dim: int) -> None:
    """Vectors take another way where one of their codes is near 0 or NaN."""
    codes = torch.full((256, dim), others, dtype=torch.uint8)
    code = torch.arange(256)
    codes[code, code % dim] = code.to(torch.uint8)
    scale = torch.tensor([0.3]).view(torch.uint8).expand(256, 4)
    expected = codes.cpu().view(torch.float8_e4m3fn).float().to(codes.device) * 0.3
    for level in simd_levels():
        with simd(level):
            values = ops.dequantize_rows(torch.cat([codes, scale], 1), RowFormat.FLOAT8, dim)
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dim", [2, 6, 16, 64, 200])
@EVERY_FORMAT
def test_values_are_half_a_step_from_what_they_were(form: RowFormat, dim: int) -> None:
    rows = rows_of(dim)[100:]  # a scale of 16 bits holds steps from 6e-8 on
    back = ops.dequantize_rows(ops.quantize_rows(rows, form), form, dim)
    if form == RowFormat.FLOAT8:
        largest = rows.abs().amax(1, keepdim=True)
        step = torch.maximum(rows.abs() / 16, largest / 448 / 1024)
    else:
        steps = 255 if form == RowFormat.INT8 else 15
        most, least = rows.amax(1, keepdim=True), rows.amin(1, keepdim=True)
        step = (most - least) / steps * 0.5 + 1e-3 * (most - least) + 1e-3 * rows.abs()
    assert bool(((back - rows).abs() <= step * 1.001).all())


@EVERY_FORMAT
def test_a_row_without_a_scale_reads_as_nan(form: RowFormat) -> None:
    rows = torch.ones(8, 6)
    rows[1, 2], rows[2, 0], rows[3, 5] = float("nan"), float("inf"), float("-inf")
    rows[4] = float("nan")
    rows[5, 0], rows[5, 1] = 3.4e38, -3.4e38  # their difference overflows float32
    rows[6, 0] = -7e4 if form == RowFormat.INT4 else float("nan")  # no bias of 16 bits
    back = ops.dequantize_rows(ops.quantize_rows(rows, form), form, 6)
    bad = [1, 2, 3, 4, 6] + ([] if form == RowFormat.FLOAT8 else [5])
    assert back.isnan().all(1).nonzero().flatten().tolist() == sorted(bad)
    assert int(back.isnan().any(1).sum()) == len(bad)
    assert torch.equal(back[[0, 7]], rows[[0, 7]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@EVERY_FORMAT
def test_rows_of_16_bits_are_quantized_as_what_they_are_in_float32(
    form: RowFormat, dtype: torch.dtype
) -> None:
    rows = rows_of(20).to(dtype)
    assert torch.equal(ops.quantize_rows(rows, form), ops.quantize_rows(rows.float(), form))


@EVERY_FORMAT
def test_bits_do_not_depend_on_threads_and_instruction_set(form: RowFormat) -> None:
    for dim in (2, 10, 24, 70, 136):
        rows = rows_of(dim, 3000)
        with threads(1), simd(0):
            packed = ops.quantize_rows(rows, form)
            values = ops.dequantize_rows(packed, form, dim)
        for level in simd_levels():
            with threads(4), simd(level):
                assert torch.equal(ops.quantize_rows(rows, form), packed)
                assert same_bits(ops.dequantize_rows(packed, form, dim), values)


def test_subnormal_floats_that_are_flushed_make_no_difference() -> None:
    rows = rows_of(16)
    for form in FORMATS:
        packed = ops.quantize_rows(rows, form)
        values = ops.dequantize_rows(packed, form, 16)
        with threads(1):
            assert torch.set_flush_denormal(True)
            try:
                flushed = ops.quantize_rows(rows, form)
                read = ops.dequantize_rows(packed, form, 16)
            finally:
                torch.set_flush_denormal(False)
        assert torch.equal(flushed, packed)
        assert same_bits(read, values)


@EVERY_FORMAT
def test_there_may_be_no_rows(form: RowFormat) -> None:
    packed = ops.quantize_rows(torch.empty(0, 4), form)
    assert packed.shape == (0, row_bytes(form, 4))
    assert ops.dequantize_rows(packed, form, 4).shape == (0, 4)
