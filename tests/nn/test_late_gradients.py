"""Programs that change gradients after backward, where rows have been updated: one warning each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_by_name

import torch_dynemb as td
from torch_dynemb.nn.forgotten_steps import FORGOTTEN_STEPS

pytestmark = pytest.mark.cpu_only("on a GPU the number of backwards is not counted")

IDS = torch.arange(3)


def model(**arguments: Any) -> nn.Sequential:
    options = {"optimizer": td.SGD(lr=0.1), **arguments}
    return nn.Sequential(td.DynamicEmbedding(2, name="ads", **options), nn.Linear(2, 1))


def backward(of: nn.Sequential) -> None:
    of(IDS).sum().backward()


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# -- clipping ----------------------------------------------------------------------------------

CLIPPING: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "norm, imported before": lambda m: imported_by_name(m.parameters(), 1.0),
    "norm of a list, one by one": lambda m: nn.utils.clip_grad_norm_(
        list(m.parameters()), 1.0, foreach=False
    ),
    "value": lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01),
    "value by module": lambda m: nn.utils.clip_grad.clip_grad_value_(list(m.parameters()), 0.01),
    "known norm": lambda m: nn.utils.clip_grads_with_norm_(m.parameters(), 1.0, torch.tensor(5.0)),
}


@pytest.mark.parametrize("clip", CLIPPING.values(), ids=CLIPPING.keys())
def test_clipping_warns_once_and_clips_parameters(clip: Callable[[nn.Module], Any]) -> None:
    warned = model()
    backward(warned)
    with pytest.warns(
        RuntimeWarning, match=r"(?s)clips.*DynamicEmbedding \(ads\).*split=True"
    ) as seen:
        clip(warned)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    gradient = warned[1].weight.grad
    plain = nn.Linear(2, 1)
    plain.load_state_dict(warned[1].state_dict())
    for _ in range(2):
        warned[0].optimizer.step()
        warned.zero_grad()
        with no_warning():
            backward(warned)
            clip(warned)
    plain.weight.grad = torch.full((1, 2), 100.0)
    warned[1].weight.grad = torch.full((1, 2), 100.0)
    warned[1].bias.grad = None
    with no_warning():
        clip(warned)
        clip(plain)
    assert torch.equal(warned[1].weight.grad, plain.weight.grad)
    assert gradient is not None
    assert not torch.equal(plain.weight.grad, torch.full((1, 2), 100.0))


@pytest.mark.parametrize("clip", CLIPPING.values(), ids=CLIPPING.keys())
def test_what_clipping_reaches_does_not_warn(clip: Callable[[nn.Module], Any]) -> None:
    clipped = model(optimizer=td.SGD(lr=0.1, clip_norm=1.0))
    split = model(split=True)
    fixed = model(optimizer=None, trainable=False)
    with no_warning():
        backward(split)
        for of in (clipped, fixed):
            backward(of)
            clip(of)
        backward(whole := model())
        clip(whole[1])
        td.clip_grad_norm_(split, 1.0)
        infinity = float("inf")  # no limit: what programs measure the norm with
        nn.utils.clip_grad_norm_(whole.parameters(), max_norm=infinity)
        nn.utils.clip_grad_value_(whole.parameters(), infinity)


@pytest.mark.parametrize("clip", CLIPPING.values(), ids=CLIPPING.keys())
def test_clipping_without_the_rows_of_split_mode_warns(clip: Callable[[nn.Module], Any]) -> None:
    split = model(split=True)
    backward(split)
    with pytest.warns(RuntimeWarning, match=r"not those of the rows .*\(ads\)") as seen:
        clip(split)
    assert [of.filename for of in seen] == [__file__]


# -- accumulation ------------------------------------------------------------------------------


def test_several_backwards_before_a_step_warn_once() -> None:
    of = model()
    for _ in range(2):
        backward(of)
    with pytest.warns(
        RuntimeWarning, match=r"\(ads\): 2 backwards came before.*split=True"
    ) as seen:
        of[0].optimizer.step()
    assert len(seen) == 1
    assert seen[0].filename == __file__
    with no_warning():
        for _ in range(3):
            backward(of)
            backward(of)
            of[0].optimizer.step()


def test_accumulation_that_begins_later() -> None:
    of = model()
    with no_warning():
        for _ in range(50):
            backward(of)
            of[0].optimizer.step()
    backward(of)
    backward(of)
    with pytest.warns(RuntimeWarning, match="2 backwards came before"):
        of[0].optimizer.step()


def test_accumulation_in_compiled_code_and_of_one_graph() -> None:
    of = model(max_rows=100)
    compiled = torch.compile(of, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        compiled(IDS).sum().backward()
    with pytest.warns(RuntimeWarning, match="3 backwards came before"):
        of[0].optimizer.step()


def test_what_is_no_accumulation_does_not_warn() -> None:
    late = model(optimizer=td.SGD(lr=0.1))
    split = model(split=True)
    with no_warning():
        for _ in range(3):
            late(IDS)  # without a backward
            late.eval()(IDS)
            late.train()
            backward(late)
            late[0].optimizer.step()
            backward(split)
            backward(split)
            split[0].optimizer.step()
        late[0].optimizer.step()
        late[0].optimizer.step(lambda: [backward(late), 1.0][1])  # type: ignore[arg-type]


def test_a_forgotten_step_is_one_warning() -> None:
    of = model()
    for _ in range(FORGOTTEN_STEPS):
        backward(of)
    with pytest.warns(RuntimeWarning, match=r"16 backwards .*split=True") as seen:
        backward(of)
    assert len(seen) == 1
    with no_warning():
        for _ in range(FORGOTTEN_STEPS):
            backward(of)
        of[0].optimizer.step()
        of.eval()
