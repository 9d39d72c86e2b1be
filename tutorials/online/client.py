"""Asks for the chance of each click as it is shown, and notes which events the answers know."""

from __future__ import annotations

import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np

from tutorials.online.events import AD, COLUMNS, TIME, USER
from tutorials.online.growing_file import count_of, read


class Client:
    """A website that asks for scores of what it shows.

    Args:
        events: the file of events. It asks for each before a model can know its click.
        socket: of the server.

    Attributes:
        scores: arrays of scores, of consecutive events.
        late: number of events that the model knew already when it was asked.
        answers: time of each answer in nanoseconds, and the number of events that it knows.
    """

    def __init__(self, events: Path, socket: Path) -> None:
        self._events, self._socket = events, socket
        self._connection: connection.Connection | None = None
        self._asked = 0
        self.scores: list[np.ndarray[Any, Any]] = []
        self.late = 0
        self.answers: list[tuple[int, int]] = []

    def connect(self) -> bool:
        """Return whether there is a server."""
        try:
            self._connection = connection.Client(str(self._socket), "AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True

    def ask(self) -> None:
        """Ask for the events that are new in the file."""
        assert self._connection is not None
        shown = read(self._events, COLUMNS, self._asked, count_of(self._events, COLUMNS))
        # a question without ids says how much the model knows by now
        self._connection.send((shown[:, USER].copy(), shown[:, AD].copy()))
        scores, seen = self._connection.recv()
        self.answers.append((time.time_ns(), seen))
        self.late += max(0, min(seen, self._asked + len(shown)) - self._asked)
        self.scores.append(scores)
        self._asked += len(shown)

    def ages(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the time of each event in nanoseconds, and its age at the first answer that
        knows it, in seconds.
        """
        times = read(self._events, COLUMNS, 0, self._asked)[:, TIME]
        ages, known = [], 0
        for now, seen in self.answers:
            if seen > known:
                ages.append((now - times[known:seen]) / 1e9)
                known = seen
        found = np.concatenate(ages) if ages else np.empty(0)
        return times[: len(found)], found
