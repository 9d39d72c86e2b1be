"""Publish what training changes, for models that serve meanwhile (--publish)."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

import torch_dynemb as td
from tutorials.dlrm.data import Position

AfterStep = Callable[[Position], None]


@contextmanager
def published(opts: Namespace, model: nn.Module, after_step: AfterStep) -> Iterator[AfterStep]:
    """Attach a model to the delta log of the options, if they name one.

    Args:
        opts: Of the job.
        model: That trains; its content is compared with the log, if there is one.
        after_step: Called after every step.

    Returns:
        The function to call after every step instead.
    """
    if opts.publish is None:
        yield after_step
        return
    with td.delta_log.DeltaLog(opts.publish, every_steps=opts.publish_every) as log:
        log.attach(model)

        def publish(position: Position) -> None:
            log.step()
            after_step(position)

        yield publish
        log.publish()
