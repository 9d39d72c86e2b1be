"""Checkpoints of a model beside each other, of which the newest stay (``keep_last=``)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from torch import nn

from torch_dynemb.checkpoint.manifest.records import InSeries
from torch_dynemb.errors import InUseError
from torch_dynemb.files.commit import remove_committed, uuid_at
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location
from torch_dynemb.nn.wrappers import wrapped_by


class _Known(NamedTuple):
    """Checkpoints that a model was saved as with ``keep_last``, or continues.

    Attributes:
        folder: the folder that has them.
        entries: oldest first.
    """

    folder: str
    entries: Sequence[InSeries]


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def continues_series(model: nn.Module, path: Location, entries: Sequence[InSeries]) -> None:
    """Note the series of the checkpoint that a model was loaded from or saved as.

    Args:
        model: the model.
        path: path of the checkpoint.
        entries: its series, from its manifest.
    """
    _known[_unwrapped(model)] = _Known(str(path.parent), entries)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model in its wrappers, which may be other ones after a load."""
    while (inner := wrapped_by(model)) is not None:
        model = model.get_submodule(inner)
    return model


class Series:
    """The series that a save of a model continues.

    Args:
        model: the model.
        path: path of the checkpoint that is saved.
        uuid: its uuid.
        keep_last: number of checkpoints that stay, itself included; None: it is not one of them.
    """

    def __init__(self, model: nn.Module, path: Location, uuid: str, keep_last: int | None) -> None:
        self._model, self._path, self._keep_last = model, path, keep_last
        known = _known.get(_unwrapped(model), _Known("", ()))
        beside = known.entries if known.folder == str(path.parent) else ()
        self.entries = [of for of in beside if of.name != path.name]
        if keep_last is not None:
            self.entries.append(InSeries(path.name, uuid))

    def committed(self, disk: Disk) -> None:
        """Remove the oldest, now that the new one is there. The next save removes what fails.

        Args:
            disk: the file system.
        """
        left = self.entries
        if self._keep_last is not None:
            folder = self._path.parent
            with suppress(OSError):
                there = [of for of in self.entries if uuid_at(folder / of.name) == of.uuid]
                left = there[-self._keep_last :]
            for old in [of for of in self.entries if of not in left]:
                try:
                    remove_committed(disk, folder / old.name, old.uuid)
                except (OSError, InUseError):
                    left = [old, *left]
        continues_series(self._model, self._path, left)


__all__ = ["Series", "continues_series"]
