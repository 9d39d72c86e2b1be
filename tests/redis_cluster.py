"""A real Redis Cluster of three nodes on loopback, without replicas."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.cluster import RedisCluster as Client
from redis.retry import Retry
from redis_server import RedisServer, need_server

_SLOTS = 16384


class ClusterOfServers(NamedTuple):
    """Three nodes with a third of the slots each.

    Attributes:
        nodes: the servers.
        ports: of the servers, on 127.0.0.1.
        url: of the cluster.
    """

    nodes: list[RedisServer]
    ports: list[int]
    url: str

    def client(self, **options: Any) -> Any:
        """A client that does not try again."""
        node = ClusterNode("127.0.0.1", self.ports[0])
        return Client(startup_nodes=[node], retry=Retry(NoBackoff(), 0), **options)

    def node_of(self, key: str) -> RedisServer:
        """The node that has a key."""
        return self.nodes[self.ports.index(self.client().get_node_from_key(key).port)]

    def port_of(self, key: str) -> int:
        """The port of the node that has a key."""
        return self.ports[self.nodes.index(self.node_of(key))]

    def begin_move(self, slot: int, before: RedisServer, after: RedisServer) -> None:
        """Move the keys of a slot from one node to another, as redis-cli does."""
        names = self._names()
        client = before.client()
        after.client().cluster("SETSLOT", slot, "IMPORTING", names[before])
        client.cluster("SETSLOT", slot, "MIGRATING", names[after])
        for key in client.cluster("GETKEYSINSLOT", slot, 1000):
            port = self.ports[self.nodes.index(after)]
            client.migrate("127.0.0.1", port, key, 0, 60_000)

    def end_move(self, slot: int, before: RedisServer, after: RedisServer) -> None:
        """Give a slot to the other node, as redis-cli does."""
        names = self._names()
        for node in (after, before, *self.nodes):
            node.client().cluster("SETSLOT", slot, "NODE", names[after])

    def _names(self) -> dict[RedisServer, bytes]:
        return {node: node.client().execute_command("CLUSTER MYID") for node in self.nodes}

    def wait(self) -> None:
        """Return once all nodes see the whole cluster."""
        for node in self.nodes:
            _wait(lambda node=node: node.client().cluster("INFO")["cluster_state"] == "ok")
            _wait(lambda node=node: len(node.client().cluster("NODES")) == len(self.nodes))


@contextmanager
def running_cluster(*options: str) -> Iterator[ClusterOfServers]:
    need_server()
    with ExitStack() as stack:
        ports = _free_ports(6)
        nodes = []
        for port, bus in zip(ports[:3], ports[3:], strict=True):
            folder = stack.enter_context(TemporaryDirectory(prefix="redis-"))
            own = ("--port", str(port), "--bind", "127.0.0.1", "--cluster-port", str(bus))
            node = RedisServer(Path(folder), *own, "--cluster-enabled", "yes", *options)
            node.start()
            stack.callback(node.kill)
            nodes.append(node)
        cluster = ClusterOfServers(nodes, ports[:3], f"redis+cluster://127.0.0.1:{ports[0]}")
        for number, node in enumerate(nodes):
            begin, end = number * _SLOTS // 3, (number + 1) * _SLOTS // 3 - 1
            node.client().execute_command("CLUSTER ADDSLOTSRANGE", begin, end)
            node.client().execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for port, bus in zip(ports[1:3], ports[4:], strict=True):
            nodes[0].client().execute_command("CLUSTER MEET", "127.0.0.1", port, bus)
        cluster.wait()
        yield cluster


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait(is_so: Callable[[], bool]) -> None:
    last = time.monotonic() + 60
    while True:
        try:
            if is_so():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < last
        time.sleep(0.05)
