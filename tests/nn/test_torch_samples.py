"""Inputs and options with which PyTorch tests its own embeddings and optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("lists of torch, which name a device")

STEPS = 4
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta")
# torch's optimizer and an option that ours lacks; the constructor refuses its name
MISSING = {("AdamW", "amsgrad"), ("RMSprop", "centered")}


def samples(name: str) -> Iterator[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    (op,) = [op for op in op_db if op.name == name]
    yield from op.sample_inputs("cpu", torch.float32, requires_grad=True)


def with_rows(module: Any, weight: Tensor, padding: int | None = None) -> Any:
    """Give ids 0, 1, ... the rows of a weight; a padding id has none."""
    ids = torch.tensor([id for id in range(len(weight)) if id != padding])
    module.group.insert_or_assign(0, ids, weight.detach()[ids])
    return module


def trained_as(expected: Tensor, weight: Tensor, got: Tensor, module: Any) -> None:
    """Compare outputs, and rows after a step of SGD with torch's gradient."""
    torch.testing.assert_close(got, expected)
    gradient = torch.randn(expected.shape)
    (of_weight,) = torch.autograd.grad(expected, weight, gradient, retain_graph=True)
    got.backward(gradient)
    ids = module.ids()
    torch.testing.assert_close(module.group.read(0, ids), (weight.detach() - of_weight)[ids])


def test_samples_of_embedding() -> None:
    tried = 0
    for sample in samples("nn.functional.embedding"):
        weight, (ids,) = sample.input, sample.args
        module = with_rows(td.DynamicEmbedding(weight.shape[1], optimizer=td.SGD(lr=1.0)), weight)
        trained_as(F.embedding(ids, weight), weight, module(ids), module)
        tried += 1
    assert tried >= 3


def test_samples_of_embedding_bag() -> None:
    tried = 0
    for sample in samples("nn.functional.embedding_bag"):
        weight, (ids,), options = sample.input, sample.args, dict(sample.kwargs)
        if options["mode"] == "max":
            with pytest.raises(ValueError, match=r"mode is 'max', expected"):
                td.DynamicEmbeddingBag(weight.shape[1], mode="max")
            continue
        expected = F.embedding_bag(ids, weight, **options)
        padding = options.pop("padding_idx", None)
        if padding is not None and padding < 0:
            padding += len(weight)  # a table without a vocabulary has no last id
        forward = {name: options.pop(name, None) for name in ("offsets", "per_sample_weights")}
        module = td.DynamicEmbeddingBag(
            weight.shape[1], padding_idx=padding, optimizer=td.SGD(lr=1.0), **options
        )
        with_rows(module, weight, padding)
        trained_as(expected, weight, module(ids, **forward), module)
        tried += 1
    assert tried >= 24


def options_of_optimizers() -> Iterator[tuple[type[torch.optim.Optimizer], dict[str, Any]]]:
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        if info.optim_cls.__name__ in OPTIMIZERS:
            for given in info.optim_inputs_func(device="cpu"):
                yield info.optim_cls, given.kwargs


def test_options_of_optimizers() -> None:
    tried = 0
    for stock, options in options_of_optimizers():
        name, given = stock.__name__, dict(options)
        if given.pop("amsgrad", False) and name == "Adam":
            name = "AMSGrad"
        elif "momentum" in given and name == "SGD":
            name = "MomentumSGD"
        given["lr"] = float(given.get("lr", inspect.signature(stock).parameters["lr"].default))
        ours: Any = getattr(td, name)
        missing = sorted({*options} - {"amsgrad"} - {*inspect.signature(ours).parameters})
        if "amsgrad" in options and name == "AdamW":
            missing.append("amsgrad")
        if missing:
            assert all((stock.__name__, option) in MISSING for option in missing)
            with pytest.raises(TypeError, match=missing[0]):
                ours(**{"lr": 0.1, missing[0]: options[missing[0]]})
            continue
        weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
        module = with_rows(td.DynamicEmbedding(5, optimizer=ours(**given)), weight.float())
        optimizer = stock([weight], **options)
        for _ in range(STEPS):
            gradient = torch.randn(6, 5)
            weight.grad = gradient.double()
            optimizer.step()
            module(torch.arange(6)).backward(gradient)
            module.optimizer.step()
        rows = module.group.read(0, torch.arange(6)).double()
        torch.testing.assert_close(rows, weight.detach(), rtol=1e-5, atol=1e-6)
        tried += 1
    assert tried >= 14
