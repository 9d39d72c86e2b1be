"""The marked device raises where a GPU would, and nowhere else."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from marked_device import DEVICE, HOST, MixedDevicesError, marked_device
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops

pytestmark = pytest.mark.cpu_only("it makes the marked device")


@pytest.fixture
def marked() -> Iterator[Tensor]:
    with marked_device():
        yield torch.arange(4.0)


def on_host(*values: float) -> Tensor:
    return torch.tensor(values, device="cpu")


MIXES: dict[str, Callable[[Tensor], object]] = {
    "numpy": lambda t: t.numpy(),
    "array": lambda t: np.asarray(t),
    "assert_allclose": lambda t: np.testing.assert_allclose(t, [0, 1, 2, 3]),
    "from_numpy": lambda t: t + torch.from_numpy(np.ones(4)),
    "device": lambda t: t * on_host(1, 2, 3, 4),
    "cpu": lambda t: torch.equal(t, t.cpu()),
    "cat": lambda t: torch.cat([t, on_host(1)]),
    "assert_close": lambda t: torch.testing.assert_close(t, t.cpu()),
    "indexed by it": lambda t: on_host(1, 2, 3, 4)[t.long()],
    "number of the device": lambda t: on_host(1, 2) + t[0],
    "generator": lambda t: torch.rand(3, generator=torch.Generator()),
    "generator of a method": lambda t: t.normal_(generator=torch.Generator()),
    "gradient": lambda t: (t.requires_grad_() * 2).backward(on_host(1, 2, 3, 4)),
    "op": lambda t: ops.pool_rows(t[:, None], on_host(0).long(), t[:2].long(), features=1),
    "saved": lambda t: t + torch.load(saved(t), map_location="cpu"),
    "sparse": lambda t: t.to_sparse() + t.cpu().to_sparse(),
}


def saved(tensor: Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("name", MIXES)
def test_mixes_raise(name: str, marked: Tensor) -> None:
    with pytest.raises(AssertionError) as raised:
        MIXES[name](marked)
    assert name == "assert_close" or isinstance(raised.value, MixedDevicesError)


def test_a_group_refuses_ids_of_the_cpu(marked: Tensor) -> None:
    module = td.DynamicEmbedding(3, optimizer=td.SGD(lr=1.0))
    with pytest.raises(ValueError, match=r"ids is on cpu .* but the table is on cpu:0"):
        module(marked.long().cpu())
    with torch.device("cpu"):
        module = td.DynamicEmbedding(3, optimizer=td.SGD(lr=1.0))
    with pytest.raises(ValueError, match=r"ids is on cpu:0 .* but the table is on cpu:"):
        module(marked.long())


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda t: t[1:].view(3, 1),
    "number of the CPU": lambda t: t + on_host(3).sum(),
    "index of the CPU": lambda t: t[on_host(1, 2).long()],
    "copy_": lambda t: t.copy_(on_host(1, 2, 3, 4)),
    "to": lambda t: on_host(1).to(t.device),
    "to other": lambda t: on_host(1).to(t),
    "gradient": lambda t: torch.autograd.grad(t.requires_grad_().square().sum(), t)[0],
    "one_hot": lambda t: torch.nn.functional.one_hot(t.long()),
    "as_tensor": lambda t: torch.as_tensor(np.ones(3)),
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "load": lambda t: torch.load(saved(t)),
    "sparse": lambda t: t.to_sparse().to_dense(),
    "generator": lambda t: torch.rand(3, generator=torch.Generator(t.device)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_made_of_it_is_on_the_device(name: str, marked: Tensor) -> None:
    result = KEPT[name](marked)
    assert result.device == DEVICE
    with pytest.raises(MixedDevicesError):
        result.numpy()


def test_what_is_copied_is_on_the_cpu(marked: Tensor) -> None:
    for copied in (marked.cpu(), marked.to("cpu"), on_host(0, 0, 0, 0).copy_(marked)):
        assert copied.device == HOST
        assert copied.numpy().tolist() == marked.tolist() == [0, 1, 2, 3]
    assert marked.to(DEVICE) is marked
    assert torch.load(saved(marked), map_location="cpu").device == HOST


def test_gradients_go_back_to_their_device(marked: Tensor) -> None:
    marked.requires_grad_()
    (marked.cpu() * on_host(1, 2, 3, 4)).sum().backward()
    assert marked.grad is not None
    assert marked.grad.device == DEVICE
    assert marked.grad.tolist() == [1, 2, 3, 4]


def test_training_on_the_device(marked: Tensor) -> None:
    module = td.DynamicEmbedding(3, optimizer=td.Adam(lr=1.0))
    output = module(marked.long())
    output.sum().backward()
    module.optimizer.step()
    assert {output.device, module.group.device, module.group.index.meta.device} == {DEVICE}
    assert {tensor.device for tensor in (*module.group.rows.weights, *module.group.rows.state)} == {
        DEVICE
    }
    assert module.group.size(0) == 4


def test_without_the_mode_nothing_is_marked() -> None:
    with marked_device():
        tensor = torch.ones(3)
    assert tensor.device == torch.get_default_device() == HOST
    assert tensor.numpy().tolist() == [1, 1, 1]
