"""Servers of the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis_cluster import ClusterOfServers, running_cluster
from redis_server import KEPT, RedisServer, running_server


@pytest.fixture(scope="session")
def one_server() -> Iterator[RedisServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def server(one_server: RedisServer) -> RedisServer:
    """An empty server that many tests share."""
    one_server.client().flushall()
    return one_server


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server that a test kills or configures."""
    with running_server(*KEPT) as server:
        yield server


@pytest.fixture(scope="session")
def one_cluster() -> Iterator[ClusterOfServers]:
    with running_cluster("--appendonly", "yes") as cluster:
        yield cluster


@pytest.fixture
def cluster(one_cluster: ClusterOfServers) -> ClusterOfServers:
    """An empty cluster that many tests share."""
    for node in one_cluster.nodes:
        node.client().flushall()
    return one_cluster
