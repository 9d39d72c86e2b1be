"""Connections to Redis servers, with their errors as built-ins and errors of this library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch_dynemb.argument_checks import described
from torch_dynemb.errors import NoRoomError

Server = Any  # redis.Redis, or its URL; the package redis is optional


def client_of(owner: str, server: Server) -> Any:
    """Return a client of a server. Connects only with the first command.

    Args:
        owner: function that errors name.
        server: URL such as ``"redis://host:6379/0"``, or a ``redis.Redis``.

    Raises:
        ImportError: the package redis is missing.
        TypeError, ValueError: ``server`` is neither, or decodes replies.
    """
    try:
        import redis
    except ImportError as error:
        raise ImportError(
            f"{owner}: the package redis is missing: pip install torch_dynemb[redis]"
        ) from error
    if isinstance(server, str):
        try:
            return redis.Redis.from_url(server)
        except ValueError as error:  # not the URL itself, which may have a password
            raise ValueError(
                f"{owner}: server is a URL that redis.Redis.from_url refuses: {error}"
            ) from error
    if not isinstance(server, redis.Redis):
        raise TypeError(
            f"{owner}: server is {described(server)}, expected a URL such as "
            "'redis://host:6379/0', or a redis.Redis"
        )
    if server.connection_pool.connection_kwargs.get("decode_responses"):
        raise ValueError(
            f"{owner}: server decodes replies to str, but rows are bytes: construct the "
            "redis.Redis without decode_responses"
        )
    return server


def place_of(client: Any) -> str:
    """Return where a server is, without its password."""
    given = client.connection_pool.connection_kwargs
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
        ConnectionError, TimeoutError: the server cannot be reached.
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
    except exceptions.ConnectionError as error:
        raise ConnectionError(
            f"{owner}: {place} cannot be reached ({error}): start the server, then call again"
        ) from error
    except exceptions.ResponseError as error:
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
    "lost_connection",
    "place_of",
    "redis_errors",
]
