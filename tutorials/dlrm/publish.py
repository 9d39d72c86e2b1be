"""Publish what training changes, for models that serve meanwhile (--publish)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

import torch_dynemb as td
from tutorials.dlrm.criteo import Position
from tutorials.dlrm.options import Options

AfterStep = Callable[[Position], None]


@contextmanager
def published(opts: Options, model: nn.Module, after_step: AfterStep) -> Iterator[AfterStep]:
    """While it lasts, what a model changes goes to the log that the options name, if they do.

    Args:
        opts: Of the job.
        model: That trains; its content is compared with what the log has, if there is one.
        after_step: What else is done after every step.

    Returns:
        What is to be called after every step.
    """
    if opts.publish is None:
        yield after_step
        return
    with td.checkpoint.DeltaLog(opts.publish, every_steps=opts.publish_every) as log:
        log.attach(model)

        def publish(position: Position) -> None:
            log.step()
            after_step(position)

        yield publish
        log.publish()
