"""Connections to Redis servers, with their errors as built-ins and errors of this library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch_dynemb.argument_checks import described
from torch_dynemb.errors import NoRoomError

Server = Any  # redis.Redis, RedisCluster, or a URL; the package redis is optional


def client_of(owner: str, server: Server, *, timeout: float | None = None) -> Any:
    """Return a client of a server, or of a cluster. A cluster is connected here.

    Args:
        owner: function that errors name.
        server: URL such as ``"redis://host:6379/0"``, or a ``redis.Redis``; of a cluster
            ``"redis+cluster://host:6379"``, any node of it, or a ``redis.cluster.RedisCluster``.
        timeout: seconds for an answer, without retries; None: as the URL says. Clients that are
            given have their own settings.

    Raises:
        ImportError: the package redis is missing.
        TypeError, ValueError: ``server`` is neither, or decodes replies.
        OSError: the cluster cannot be reached.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.cluster import RedisCluster
        from redis.retry import Retry
    except ImportError as error:
        raise ImportError(
            f"{owner}: the package redis is missing: pip install torch_dynemb[redis]"
        ) from error
    if isinstance(server, str):
        options: dict[str, Any] = {}
        if timeout is not None:
            options = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
            options["retry"] = Retry(NoBackoff(), 0)
        scheme, _, rest = server.partition("+cluster://")
        try:
            if not rest:
                return redis.Redis.from_url(server, **options)
            with redis_errors(owner, None):
                return RedisCluster.from_url(f"{scheme}://{rest}", **options)
        except ValueError as error:  # not the URL itself, which may have a password
            raise ValueError(
                f"{owner}: server is a URL that redis.Redis.from_url refuses: {error}"
            ) from error
    if not isinstance(server, redis.Redis | RedisCluster):
        raise TypeError(
            f"{owner}: server is {described(server)}, expected a URL such as "
            "'redis://host:6379/0', a redis.Redis, or of a cluster 'redis+cluster://host:6379' or "
            "a redis.cluster.RedisCluster"
        )
    if _options(server).get("decode_responses"):
        raise ValueError(
            f"{owner}: server decodes replies to str, but rows are bytes: construct the "
            "client without decode_responses"
        )
    return server


def is_cluster(client: Any) -> bool:
    """Return whether a client is one of a cluster.

    Args:
        client: of :func:`client_of`.
    """
    from redis.cluster import RedisCluster

    return isinstance(client, RedisCluster)


def _options(client: Any) -> dict[str, Any]:
    if is_cluster(client):
        return dict(client.nodes_manager.connection_kwargs)
    return dict(client.connection_pool.connection_kwargs)


def place_of(client: Any) -> str:
    """Return where a server is, without its password.

    Args:
        client: of :func:`client_of`; None: a cluster that has not been reached.
    """
    if client is None:
        return "Redis Cluster"
    if is_cluster(client):
        return f"Redis Cluster of {', '.join(sorted(node.name for node in client.get_nodes()))}"
    given = _options(client)
    where = given.get("path") or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}"
    return f"Redis at {where}, database {given.get('db') or 0}"


@contextmanager
def redis_errors(owner: str, client: Any) -> Iterator[None]:
    """Raise errors of Redis as those that programs can act on.

    Args:
        owner: function that errors name.
        client: client that raises them.

    Raises:
        NoRoomError: the server has no memory left.
        PermissionError: the password is missing or wrong, or the user may not call a command.
        ConnectionError, TimeoutError: the server, or a node, cannot be reached.
        ValueError: the server is a node of a cluster, but the client is not one of a cluster.
        RuntimeError: the server reports another error.
    """
    from redis import exceptions

    place = place_of(client)
    try:
        yield
    except exceptions.OutOfMemoryError as error:
        raise NoRoomError(
            f"{owner}: {place} has no memory left: raise its maxmemory, or drop old data; nothing "
            "of this call was kept that a reader takes for whole"
        ) from error
    except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
        raise PermissionError(
            f"{owner}: {place} refuses the user ({error}): give a URL with user and password, "
            "redis://USER:PASSWORD@host:6379/0, or a redis.Redis with them"
        ) from error
    except exceptions.TimeoutError as error:
        raise TimeoutError(
            f"{owner}: {place} does not answer ({error}): check the server, then call again"
        ) from error
    except (
        exceptions.ConnectionError,
        exceptions.ClusterError,
        exceptions.RedisClusterException,
        exceptions.TryAgainError,
    ) as error:
        raise ConnectionError(
            f"{owner}: {place} cannot be reached ({error}): start the server, then call again"
        ) from error
    except exceptions.ResponseError as error:
        is_text = str(error).startswith(("MOVED ", "ASK "))  # redis 5 has no class for both
        if is_text or isinstance(error, exceptions.AskError):
            raise ValueError(
                f"{owner}: {place} is a node of a Redis Cluster: give 'redis+cluster://host:6379', "
                "or a redis.cluster.RedisCluster"
            ) from error
        raise RuntimeError(f"{owner}: {place} refuses a command: {error}") from error


def lost_connection(owner: str, client: Any) -> ConnectionError:
    """Return the error of a transaction that may or may not have been carried out."""
    return ConnectionError(
        f"{owner}: the connection to {place_of(client)} was lost during a write: call again"
    )


def check_kinds(owner: str, client: Any, kinds: Mapping[str, str]) -> None:
    """Raise ValueError if keys have values of another program.

    Args:
        owner: function that errors name.
        client: client of the server.
        kinds: type of the value of each key, which may be missing.
    """
    for key, kind in kinds.items():
        found = client.type(key).decode()
        if found not in (kind, "none"):
            raise ValueError(
                f"{owner}: key {key!r} of {place_of(client)} has a {found} of another program, "
                f"expected a {kind} or none: take another name"
            )


def check_keeps_keys(owner: str, client: Any) -> None:
    """Raise ValueError if a server evicts keys when its memory is full.

    Args:
        owner: function that errors name.
        client: client of the server.
    """
    nodes = [client]
    if is_cluster(client):
        nodes = [client.get_redis_connection(node) for node in client.get_primaries()]
    for node in nodes:
        _check_keeps_keys(owner, node)


def _check_keeps_keys(owner: str, client: Any) -> None:
    memory = client.info("memory")
    policy = str(memory.get("maxmemory_policy", ""))
    if policy.startswith("allkeys") and int(memory.get("maxmemory", 0)) > 0:
        raise ValueError(
            f"{owner}: {place_of(client)} has the maxmemory-policy {policy}, which would drop rows "
            "silently: set it to noeviction"
        )


__all__ = [
    "Server",
    "check_keeps_keys",
    "check_kinds",
    "client_of",
    "is_cluster",
    "lost_connection",
    "place_of",
    "redis_errors",
]
