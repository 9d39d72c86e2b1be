"""Places of checkpoints and logs: paths of the local disk, and URLs of fsspec."""

from __future__ import annotations

import os
import re
from os import PathLike
from pathlib import Path

from torch_dynemb.argument_checks import described
from torch_dynemb.files.object_store import ObjectStore

_URL = re.compile(r"(?:[a-z0-9]+::)*([A-Za-z][A-Za-z0-9+.-]*)://")
_LOCAL = ("file", "local")


class Url:
    """A place in a file system of fsspec, with the methods of a ``Path`` that checkpoints use.

    Args:
        store: the file system.
        text: the URL, without a slash at its end.

    Attributes:
        store: the file system.
    """

    def __init__(self, store: ObjectStore, text: str) -> None:
        self.store, self._text = store, text

    def __truediv__(self, name: str) -> Url:
        return Url(self.store, f"{self._text}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self._text.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """The URL without its last part."""
        return Url(self.store, self._text.rpartition("/")[0])

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Url({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Url) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


Location = Path | Url


def local(path: Location) -> Path:
    """Return a place that is on the local disk."""
    assert isinstance(path, Path)
    return path


def is_url(path: object) -> bool:
    """Return whether a path is the URL of a file system other than the local one."""
    found = _URL.match(path) if isinstance(path, str) else None
    return found is not None and found[1].lower() not in _LOCAL


def location_of(owner: str, path: object) -> Location:
    """Return the place that a path or a URL names.

    Args:
        owner: prefix of errors.
        path: path of the local disk, or URL of fsspec.

    Raises:
        TypeError: it is neither.
        ValueError: it is a chained URL, or one that a ``Path`` has spoiled, or its protocol is
            unknown.
        ModuleNotFoundError: the package of its protocol is missing.
    """
    if isinstance(path, Url):
        return path
    if not isinstance(path, str | PathLike):
        raise TypeError(f"{owner}: path is {described(path)}, expected a str or a Path")
    text = os.fspath(path)
    if isinstance(path, str) and _URL.match(text):
        return _url_of(owner, text)
    spoiled = re.match(r"([a-z][a-z0-9+.-]+):/[^/]", text)
    if spoiled and not isinstance(path, str):
        raise ValueError(
            f"{owner}: path is {text!r}, which pathlib made of a URL by removing a slash: give "
            "URLs as text"
        )
    return Path(text)


def _url_of(owner: str, text: str) -> Location:
    protocol, _, rest = text.partition("://")
    if "::" in text:
        raise ValueError(
            f"{owner}: path is {text!r}: chained URLs of fsspec are not supported: give the URL of "
            "a file system alone"
        )
    if protocol.lower() in _LOCAL:
        return Path(rest)
    if not rest.strip("/"):
        raise ValueError(f"{owner}: path is {text!r}, which names no folder: add one")
    # torch needs fsspec, too; imported here because few programs have URLs
    import fsspec
    from fsspec.core import url_to_fs
    from fsspec.registry import known_implementations

    try:
        fs, _ = url_to_fs(text)
    except ImportError as error:
        needed = known_implementations.get(protocol, {})
        package = str(needed.get("class", "")).partition(".")[0]
        remedy = f"pip install {package}" if package not in ("", "fsspec") else needed.get("err")
        raise ModuleNotFoundError(
            f"{owner}: path is {text!r}, and the package of {protocol}:// cannot be imported "
            f"({error}): {remedy or 'install it'}"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{owner}: path is {text!r}, and fsspec {fsspec.__version__} cannot open it: {error}: "
            "expected a path, or a URL such as s3://, gs://, hdfs:// or memory://"
        ) from error
    return Url(ObjectStore(fs), text.rstrip("/"))


def checked_location(owner: str, path: object) -> Location:
    """Return a place from a user, with links of a local path resolved.

    Args:
        owner: prefix of errors.
        path: path of the local disk, or URL of fsspec.

    Raises:
        TypeError, ValueError, ModuleNotFoundError: see :func:`location_of`.
    """
    found = location_of(owner, path)
    return found if isinstance(found, Url) else Path(os.path.realpath(found))


def checked_path(owner: str, path: object) -> Path:
    """Return a path of the local disk from a user, with links resolved.

    Raises:
        TypeError: it is not a path.
        ValueError: it is a URL.
    """
    if is_url(path):
        raise ValueError(
            f"{owner}: path is {path!r}, but only checkpoints and delta logs can have a URL: give "
            "a path of the local disk"
        )
    return local(checked_location(owner, path))


__all__ = [
    "Location",
    "Url",
    "checked_location",
    "checked_path",
    "is_url",
    "local",
    "location_of",
]
