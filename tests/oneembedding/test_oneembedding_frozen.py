"""td.freeze of OneEmbedding's modules: what the live ones give in eval mode."""

from __future__ import annotations

import io

import pytest
import torch
from small_embeddings import embedding
from torch import Tensor
from torch.ao.quantization import PlaceholderObserver, QConfig
from torch.export import Dim

import torch_dynemb as td
from torch_dynemb import oneembedding

pytestmark = pytest.mark.any_device

IDS = torch.tensor([[7, 7, 9], [8, 7, 5], [7, 2, 9], [3, 7, 9]])
NUMBERS = torch.tensor([[2, 0, 1], [0, 0, 0], [2, 2, 1], [0, 1, 2]])


def trained(**options: object) -> oneembedding.MultiTableMultiColumnEmbedding:
    module = embedding(3, [4, 8], **options)  # type: ignore[arg-type]
    optimizer = oneembedding.Optimizer(torch.optim.Adam(module.parameters(), lr=0.1), [module])
    for _ in range(2):
        module(IDS).square().sum().backward()
        optimizer.step()
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_embeddings(dtype: torch.dtype) -> None:
    module = trained(dtype=dtype, padding_idx=5)
    frozen = td.freeze(module)
    module.eval()
    given: list[tuple[Tensor, ...]] = [(IDS,), (IDS + 1,), (IDS[:0],), (IDS, NUMBERS)]
    given += [(IDS[:0], NUMBERS[:0]), (IDS.reshape(2, 6), NUMBERS.reshape(2, 6).to(torch.int32))]
    for arguments in given:
        assert frozen(*arguments).dtype == dtype
        assert torch.equal(frozen(*arguments), module(*arguments))
    assert frozen.sizes() == module.sizes()
    assert frozen.half()(IDS).dtype == torch.float16
    with pytest.raises(ValueError, match=r"FrozenMultiTableEmbedding: ids has shape \(3, 4\)"):
        frozen(IDS.t())
    with pytest.raises(TypeError, match=r"FrozenMultiTableEmbedding: ids is .*expected a dense"):
        frozen(IDS.int())


@pytest.mark.traced
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("numbered", [False, True])
def test_exported(strict: bool, numbered: bool) -> None:
    module = trained()
    arguments = (IDS, NUMBERS) if numbered else (IDS,)
    shapes = tuple({0: Dim("batch")} for _ in arguments)
    program = torch.export.export(
        td.freeze(module), arguments, dynamic_shapes=shapes, strict=strict
    )
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    module.eval()
    for samples in (IDS, IDS[:0], torch.cat([IDS, IDS + 1, IDS])):
        given = (samples, (samples + 1) % 3) if numbered else (samples,)
        assert torch.equal(loaded(*given), module(*given))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_rows_in_the_form_of_a_qconfig() -> None:
    module = trained()
    observers = [PlaceholderObserver.with_args(dtype=of) for of in (torch.float16, torch.int8)]
    module.qconfig = QConfig(*observers)  # type: ignore[assignment]
    made = oneembedding.FrozenMultiTableEmbedding.from_float(module)
    assert torch.equal(made(IDS), td.freeze(module, rows="int8")(IDS).half())


@pytest.mark.traced
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced() -> None:
    """Of any batch; numbers of tables that are none are refused by the lookup."""
    frozen = td.freeze(trained())
    by_column, by_number = (torch.jit.trace(frozen, given) for given in ((IDS,), (IDS, NUMBERS)))
    for batch in (0, 1, 3):
        assert torch.equal(by_column(IDS[:batch]), frozen(IDS[:batch]))
        given = IDS[:batch], NUMBERS[:batch]
        assert torch.equal(by_number(*given), frozen(*given))
    for number in (3, -1):
        with pytest.raises(RuntimeError, match="serve_lookup: "):
            by_number(IDS, torch.full_like(NUMBERS, number))
