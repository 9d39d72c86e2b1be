"""Fixtures of tests of tutorials."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch


@pytest.fixture
def same_threads_afterwards() -> Iterator[None]:
    """A job sets torch's number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the report, which takes longer than a small job; other tests are about it."""
    from tutorials.dlrm import report

    monkeypatch.setattr(report, "write_report", lambda *_: None)


@pytest.fixture
def ctrl_c_after_a_save() -> Callable[[], AbstractContextManager[None]]:
    """Press Ctrl-C when a job has begun its first save, or finished it."""
    # here, since tests of other tutorials run without pyarrow
    from tutorials.dlrm.data import Position
    from tutorials.dlrm.job.checkpoint import Checkpoints

    save = Checkpoints.save

    def save_and_stop(checkpoints: Checkpoints, position: Position) -> None:
        save(checkpoints, position)
        signal.raise_signal(signal.SIGINT)

    @contextmanager
    def interrupted() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoints, "save", save_and_stop)
            with pytest.raises(SystemExit) as caught:
                yield
        assert caught.value.code == 130

    return interrupted
