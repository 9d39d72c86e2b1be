"""The training step of the job, and how long its parts take."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from whole_job.models import Candidate
from whole_job.samples import Samples

from tutorials.dlrm.loop import Loss

Step = Callable[[Samples], None]
_FORWARD, _BACKWARD, _OPTIMIZERS = "the forward", "the backward", "the optimizers"
_SPANS = (_FORWARD, _BACKWARD, _OPTIMIZERS)
# one op in eager training
_LOOKUP = ("dynemb::insert_and_read", "dynemb::find_or_insert_", "dynemb::embedding_forward")
_UPDATE = re.compile(r"dynemb::\w+_backward_")


def training_step(candidate: Candidate, *, compiled: bool) -> Step:
    """Return the job's step with a batch, without reading it and without figures.

    Args:
        compiled: the forward and its backward.
    """
    forward: Callable[..., Any] = Loss(candidate.model)
    if compiled:
        forward = torch.compile(forward, fullgraph=candidate.fullgraph, dynamic=True)

    def step(batch: Samples) -> None:
        for optimizer in candidate.optimizers:
            optimizer.zero_grad()
        with record_function(_FORWARD):
            loss, _ = forward(batch.dense, batch.ids, batch.labels)
        with record_function(_BACKWARD):
            loss.backward()
        with record_function(_OPTIMIZERS):
            for optimizer in candidate.optimizers:
                optimizer.step()

    return step


def parts_of_a_step(step: Step, batches: Sequence[Samples]) -> dict[str, float]:
    """Return milliseconds of the parts of an eager step, by the profiler's clock.

    Args:
        step: has been called before.
        batches: of which the mean is taken.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for batch in batches:
            step(batch)
    events = {event.key: event for event in profiled.key_averages()}

    def milliseconds(microseconds: float) -> float:
        return microseconds / 1e3 / len(batches)

    spans = {name: milliseconds(events[name].cpu_time_total) for name in _SPANS}
    # between the ops: what is neither in one nor in autograd's engine
    python = {name: milliseconds(events[name].self_cpu_time_total) for name in _SPANS}
    lookup = milliseconds(sum(events[name].cpu_time_total for name in _LOOKUP if name in events))
    update = milliseconds(
        sum(event.cpu_time_total for key, event in events.items() if _UPDATE.fullmatch(key))
    )
    return {
        "find and lookup": lookup,
        "dense forward": spans[_FORWARD] - python[_FORWARD] - lookup,
        "dense backward": spans[_BACKWARD] - python[_BACKWARD] - update,
        "update of the rows": update,
        "optimizers' steps": spans[_OPTIMIZERS] - python[_OPTIMIZERS],
        "Python between ops": sum(python.values()),
    }
