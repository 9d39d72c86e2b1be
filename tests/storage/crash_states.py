"""What a disk may hold after a power failure, from a log of what a process did to its files.

``file_shim.environment(log=...)`` writes the log; ``crash_states`` gives, for every prefix of it,
trees of files that a file system may show afterwards. The rules are those of ext4 with a journal of
metadata, and less than it promises where programs should not count on it:

* *Names.* Creations, mkdir, link, rename, unlink and rmdir survive in order: if one does, all
  before it do, in all folders, because they are in one journal. An fsync of a folder makes all
  before it survive. That of a file does not, although ext4's does.
* *Content.* Each write, truncation and allocation survives or not, whatever becomes of others and
  of names, until an fsync or fdatasync of its file, which began after it, has returned. A write
  may be torn at a sector of 512 bytes. Where a write is missing before one that survived, there
  are zeros, or what was there before.
* A killed process leaves all that it did: that is one of the states.

What the log does not have is said in ``file_shim``. Symbolic links are not known.
"""

from __future__ import annotations

import hashlib
import os
import random
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SECTOR = 512
WRITE, TRUNCATE, ALLOCATE, SYNC, RENAME, UNLINK, LINK, MAKE_FOLDER, OPEN = range(1, 10)
NAMES = ("", "write", "truncate", "allocate", "sync", "rename", "unlink", "link", "mkdir", "open")
_HEAD = struct.Struct("<IIIIqqq")
_KEEP_SIZE, _PUNCH_HOLE, _ZERO_RANGE = 1, 2, 16  # modes of fallocate
_EXCHANGE = 2  # of renameat2


@dataclass(frozen=True)
class Change:
    """A call that has changed files.

    Attributes:
        kind: one of the numbers above.
        path: below the logged folder, "" for itself; None: elsewhere.
        other: the new name of a rename or link.
        flag: of ``OPEN``, O_CREAT if it made the file, O_TRUNC if it may have emptied it; of
            ``ALLOCATE`` and ``RENAME`` theirs.
        offset: of what is written or allocated.
        size: of what is written, truncated or allocated.
        begin: where the log ended when the call began.
        at: where the log ended when it returned.
        data: what is written.
    """

    kind: int
    path: str | None
    other: str | None
    flag: int
    offset: int
    size: int
    begin: int
    at: int
    data: bytes

    def __str__(self) -> str:
        return f"{NAMES[self.kind]} {self.path} {self.other or ''}".strip()


def read_log(log: Path, folder: Path) -> list[Change]:
    """The changes below a folder, in order; an unfinished record at the end is left out."""
    text = log.read_bytes() if log.exists() else b""
    root = folder.resolve()

    def below(name: bytes) -> str | None:
        path = Path(os.fsdecode(name))
        if not name or not path.is_relative_to(root):
            return None
        relative = str(path.relative_to(root))
        return "" if relative == "." else relative

    changes = []
    position = 0
    while position + _HEAD.size <= len(text):
        kind, path_bytes, other_bytes, flag, offset, size, begin = _HEAD.unpack_from(text, position)
        data_bytes = size if kind == WRITE else 0
        first = position + _HEAD.size
        second = first + path_bytes
        third = second + other_bytes
        end = third + data_bytes
        if end > len(text):
            break
        path, other = below(text[first:second]), below(text[second:third])
        data = text[third:end]
        changes.append(Change(kind, path, other, flag, offset, size, begin, position, data))
        position = end
    return changes


FOLDER = -1
Names = dict[str, int]  # what is where: FOLDER, or the number of a file
Part = tuple[int, int]  # of a write's data, from and to; (0, 0) is none of it


@dataclass(frozen=True)
class _NameChange:
    """``path`` is from now on ``number``, or nothing (None), or moves to ``moved_to``."""

    at: int
    path: str
    number: int | None = None
    moved_to: str | None = None

    def apply(self, names: Names) -> None:
        if self.moved_to is None:
            if self.number is None:
                del names[self.path]
            else:
                names[self.path] = self.number
            return
        moved = _below(names, self.path)
        for old in [*moved, *_below(names, self.moved_to)]:
            names.pop(old, None)
        names.update({self.moved_to + old[len(self.path) :]: n for old, n in moved.items()})


def _below(names: Names, path: str) -> Names:
    return {p: n for p, n in names.items() if p == path or p.startswith(f"{path}/")}


@dataclass
class _File:
    """What becomes of a file's bytes.

    Attributes:
        first: what it held when the log began.
        changes: writes, truncations and allocations.
        synced: which of them surely survive.
    """

    first: bytes = b""
    changes: list[Change] = field(default_factory=list)
    synced: list[bool] = field(default_factory=list)

    def content(self, kept: list[Part | None]) -> bytes:
        """``kept``: of each change, the part of its data, or None where it did not survive."""
        held = bytearray(self.first)
        for change, part in zip(self.changes, kept, strict=True):
            if part is None:
                continue
            end = change.offset + change.size
            if change.kind == TRUNCATE:
                del held[change.size :]
                held.extend(bytes(change.size - len(held)))
            elif change.kind == WRITE:
                begin, end = change.offset + part[0], change.offset + part[1]
                held.extend(bytes(max(0, end - len(held))))
                held[begin:end] = change.data[slice(*part)]
            else:
                if not change.flag & _KEEP_SIZE:
                    held.extend(bytes(max(0, end - len(held))))
                if change.flag & (_PUNCH_HOLE | _ZERO_RANGE):
                    end = min(end, len(held))
                    held[change.offset : end] = bytes(max(0, end - change.offset))
        return bytes(held)


@dataclass(frozen=True)
class CrashState:
    """A tree of files.

    Attributes:
        prefix: how many changes had happened.
        what: which of them survived, in words.
        files: by path, what a file holds; None is a folder.
    """

    prefix: int
    what: str
    files: dict[str, bytes | None]

    def write(self, folder: Path) -> None:
        """Makes the tree in an empty folder."""
        for path, held in sorted(self.files.items()):
            if held is None:
                (folder / path).mkdir()
            else:
                (folder / path).write_bytes(held)

    def __str__(self) -> str:
        return f"after {self.prefix} changes, {self.what}"


class _Replay:
    """Files and names after some changes, and what of them is not yet sure to survive."""

    def __init__(self, start: Path | None) -> None:
        self.files: list[_File] = []
        self.first_names: Names = {}
        for path in sorted(start.rglob("*")) if start is not None else ():
            number = FOLDER
            if path.is_file():
                number = self._new_file(path.read_bytes())
            self.first_names[str(path.relative_to(start))] = number  # type: ignore[arg-type]
        self.names = dict(self.first_names)
        self.name_changes: list[_NameChange] = []
        self.synced_names = 0

    def _new_file(self, first: bytes = b"") -> int:
        self.files.append(_File(first))
        return len(self.files) - 1

    def _rename(self, change: _NameChange) -> None:
        change.apply(self.names)
        self.name_changes.append(change)

    def _change_content(self, path: str, change: Change) -> None:
        if path.endswith(" (deleted)"):  # the kernel's name of it; no program will see it
            return
        file = self.files[self.names[path]]
        file.changes.append(change)
        file.synced.append(False)

    def apply(self, change: Change) -> None:
        path, at = change.path, change.at
        if path is None:
            raise ValueError(f"{change}: what comes from another folder is not known")
        if change.kind == OPEN:
            if path not in self.names:
                self._rename(_NameChange(at, path, self._new_file()))
            elif change.flag & os.O_TRUNC:
                self._change_content(path, _emptied(change))
        elif change.kind == MAKE_FOLDER:
            self._rename(_NameChange(at, path, FOLDER))
        elif change.kind == UNLINK:
            self._rename(_NameChange(at, path))
        elif change.kind == LINK:
            assert change.other is not None
            self._rename(_NameChange(at, change.other, self.names[path]))
        elif change.kind == RENAME:
            if change.flag & _EXCHANGE:
                raise ValueError(f"{change}: names that are exchanged are not known here")
            self._rename(_NameChange(at, path, moved_to=change.other))
        elif change.kind == SYNC:
            self._sync(path, change.begin)
        else:
            self._change_content(path, change)

    def _sync(self, path: str, begin: int) -> None:
        number = FOLDER if path == "" else self.names.get(path)
        if number == FOLDER:
            done = sum(change.at < begin for change in self.name_changes)
            self.synced_names = max(self.synced_names, done)
        elif number is not None:
            file = self.files[number]
            file.synced = [
                was or change.at < begin
                for was, change in zip(file.synced, file.changes, strict=True)
            ]

    def names_after(self, count: int) -> Names:
        names = dict(self.first_names)
        for change in self.name_changes[:count]:
            change.apply(names)
        return names

    def unsure(self) -> list[tuple[int, int]]:
        """Number of the file, and of its change, of what may be lost; in the order of the log."""
        reached = set(self.names.values()) | set(self.names_after(self.synced_names).values())
        found = [
            (file.changes[i].at, number, i)
            for number, file in enumerate(self.files)
            if number in reached
            for i, is_synced in enumerate(file.synced)
            if not is_synced
        ]
        return [(number, i) for _, number, i in sorted(found)]

    def tree(
        self, names: int, parts: dict[tuple[int, int], Part | None]
    ) -> dict[str, bytes | None]:
        """With the first so many changes of names, and these parts of changes; of others all."""
        tree: dict[str, bytes | None] = {}
        for path, number in self.names_after(names).items():
            if number == FOLDER:
                tree[path] = None
                continue
            file = self.files[number]
            whole = [(0, len(change.data)) for change in file.changes]
            tree[path] = file.content(
                [parts.get((number, i), part) for i, part in enumerate(whole)]
            )
        return tree


def _emptied(change: Change) -> Change:
    return Change(TRUNCATE, change.path, None, 0, 0, 0, change.begin, change.at, b"")


def _cuts(change: Change) -> list[int]:
    """Where a write may tear: bytes of its data before a sector begins."""
    first = -change.offset % SECTOR or SECTOR
    return list(range(first, len(change.data), SECTOR))


def _states(replay: _Replay, prefix: int, drawn: int, draw: random.Random) -> Iterator[CrashState]:
    unsure = replay.unsure()
    least, most = replay.synced_names, len(replay.name_changes)
    none: dict[tuple[int, int], Part | None] = dict.fromkeys(unsure)

    def state(what: str, names: int, parts: dict[tuple[int, int], Part | None]) -> CrashState:
        return CrashState(prefix, what, replay.tree(names, parts))

    yield state("everything", most, {})
    yield state("what was synced", least, none)
    yield state("all names, content that was synced", most, none)
    yield state("names that were synced, all content", least, {})
    for number, i in reversed(unsure):
        change = replay.files[number].changes[i]
        if cuts := _cuts(change):
            torn: dict[tuple[int, int], Part | None] = {(number, i): (0, draw.choice(cuts))}
            yield state(f"everything, but torn: {change}", most, torn)
            break
    for k in range(drawn if unsure or most > least else 0):
        parts: dict[tuple[int, int], Part | None] = {}
        for number, i in unsure:
            change = replay.files[number].changes[i]
            cuts = _cuts(change)
            fate = draw.choice(["kept", "lost", "begins", "ends"] if cuts else ["kept", "lost"])
            if fate == "lost":
                parts[number, i] = None
            elif fate == "begins":
                parts[number, i] = (0, draw.choice(cuts))
            elif fate == "ends":
                parts[number, i] = (draw.choice(cuts), len(change.data))
        yield state(f"drawn, number {k}", draw.randint(least, most), parts)


def crash_states(
    changes: Sequence[Change],
    start: Path | None = None,
    *,
    prefixes: Collection[int] | None = None,
    drawn: int = 2,
    seed: int = 0,
) -> Iterator[CrashState]:
    """What the folder may hold after a power failure.

    Args:
        changes: of ``read_log``.
        start: what the folder held when the log began, all of it safely; None: nothing.
        prefixes: numbers of changes that have happened, 0 to all; None: each.
        drawn: how many states are drawn for a prefix, beside the five that are made for each.
        seed: of what is drawn.

    Yields:
        States that differ from each other.
    """
    replay = _Replay(start)
    seen: set[bytes] = set()
    for prefix in range(len(changes) + 1):
        if prefix > 0:
            replay.apply(changes[prefix - 1])
        if prefixes is not None and prefix not in prefixes:
            continue
        for state in _states(replay, prefix, drawn, random.Random(f"{seed} {prefix}")):
            digest = hashlib.sha256(repr(sorted(state.files.items())).encode()).digest()
            if digest not in seen:
                seen.add(digest)
                yield state
