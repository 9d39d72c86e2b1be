"""Commands for the nodes of a cluster, or for one server: one round trip a node, all at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha1
from typing import Any, NamedTuple

from torch_dynemb.delta_log.redis.connection import is_cluster, redis_errors

_MOST_NODES = 64  # that are asked at the same time


class Command(NamedTuple):
    """A command for one key.

    Attributes:
        keys: of its slot.
        args: what follows the keys.
        script: Lua text; empty: ``command`` is called.
        command: name of the command.
    """

    keys: tuple[str, ...]
    args: Sequence[Any]
    script: str = ""
    command: str = ""

    def words(self, *, by_hash: bool) -> tuple[Any, ...]:
        """Return the command as it is sent.

        Args:
            by_hash: call a script that the node has by its hash.
        """
        if not self.script:
            return (self.command, *self.keys, *self.args)
        name = ("EVALSHA", _hash(self.script)) if by_hash else ("EVAL", self.script)
        return (*name, len(self.keys), *self.keys, *self.args)


class Nodes:
    """The nodes behind a client.

    Args:
        client: ``redis.Redis`` or ``redis.cluster.RedisCluster``.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def answers(self, owner: str, calls: Sequence[Command]) -> list[Any]:
        """Send commands to the nodes of their keys, and wait for all answers.

        Args:
            owner: function that errors name.
            calls: at most one for each key.

        Returns:
            For each call the answer, or the exception, as :func:`redis_errors` makes it. If a node
            fails, all of its calls have its exception: they may or may not have been carried out.
        """
        if not is_cluster(self.client):
            return self._ask(owner, self.client, calls)
        groups: dict[str, tuple[Any, list[int]]] = {}
        with redis_errors(owner, self.client):
            for place, call in enumerate(calls):
                node = self.client.get_node_from_key(call.keys[0])
                if node is None:
                    self.refresh()
                    raise ConnectionError(
                        f"{owner}: no node of {self.client!r} has the slot of {call.keys[0]!r}"
                    )
                groups.setdefault(node.name, (node, []))[1].append(place)
        found: list[Any] = [None] * len(calls)
        *others, last = list(groups.values()) or [(None, [])]
        futures = [
            self._threads().submit(self._of_node, owner, node, [calls[place] for place in places])
            for node, places in others
        ]
        if last[1]:
            own = self._of_node(owner, last[0], [calls[place] for place in last[1]])
            _put(found, last[1], own)
        for future, (_, places) in zip(futures, others, strict=True):
            _put(found, places, future.result())
        return found

    def refresh(self) -> None:
        """Ask the cluster anew which node has which slot."""
        if is_cluster(self.client):
            with redis_errors("RedisRows", self.client):
                self.client.nodes_manager.initialize()

    def _of_node(self, owner: str, node: Any, calls: Sequence[Command]) -> list[Any]:
        try:
            with redis_errors(owner, self.client):
                client = self.client.get_redis_connection(node)
        except Exception as error:
            return [error] * len(calls)
        return self._ask(owner, client, calls)

    def _ask(self, owner: str, client: Any, calls: Sequence[Command]) -> list[Any]:
        """Send commands to one node as one message."""
        from redis.exceptions import AskError, TryAgainError

        scripts = dict.fromkeys(call.script for call in calls if call.script)
        try:
            with redis_errors(owner, client), client.pipeline(transaction=False) as pipe:
                for script in scripts:  # a node may have been restarted
                    pipe.execute_command("SCRIPT LOAD", script)
                for call in calls:
                    pipe.execute_command(*call.words(by_hash=True))
                found: list[Any] = pipe.execute(raise_on_error=False)[len(scripts) :]
        except Exception as error:
            return [error] * len(calls)
        for place, answer in enumerate(found):
            if not isinstance(answer, Exception):
                continue
            try:
                with redis_errors(owner, client):
                    if not is_cluster(self.client) or not isinstance(
                        answer, AskError | TryAgainError
                    ):
                        raise answer
                    # the slot is at another node: this client follows, and learns where
                    found[place] = self.client.execute_command(*calls[place].words(by_hash=False))
            except Exception as error:
                found[place] = error
        return found

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._process != os.getpid():  # a fork has no threads
            self._pool = ThreadPoolExecutor(_MOST_NODES, "redis rows")
            self._process = os.getpid()
        return self._pool


def _put(found: list[Any], places: Sequence[int], answers: Sequence[Any]) -> None:
    for place, answer in zip(places, answers, strict=True):
        found[place] = answer


def _hash(script: str) -> str:
    return sha1(script.encode()).hexdigest()


__all__ = ["Command", "Nodes"]
