"""A loaded package: runs, and takes updates of its rows."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dynemb.checkpoint.delta_log.follower import Follower
from torch_dynemb.serving.live_state import LiveUpdate
from torch_dynemb.serving.packages.inputs import Input, leaves_of, shape_text, tensors_of
from torch_dynemb.serving.packages.live_package import LiveStats
from torch_dynemb.serving.packages.manifest import PackageManifest, ServedTable
from torch_dynemb.serving.packages.versions import Versions


class ServedModel:
    """A model of a package, ready to run. Any number of threads may run it.

    Made by :func:`load`. As a context it is closed at its end. Rows of a package that was exported
    with ``headroom=`` may be updated while threads run it; its dense part changes by the commits of
    a delta log only.

    Args:
        manifest: what its package says of itself.
        versions: the compiled code, with its constants.
        follow: makes :attr:`follower` of a function that gives the versions as long as the model is
            open; None: it follows no delta log.

    Attributes:
        version: what the exporting program calls this version of the model. Updates of rows do not
            change it; :meth:`stats` counts them.
        tables: number of ids, at the time of the export, and columns by name of the table.
        device: that the inputs have to be on.
        inputs: name, dtype and sizes of the tensors that the model takes, in the order of
            :meth:`run_flat`.
    """

    def __init__(
        self,
        manifest: PackageManifest,
        versions: Versions,
        follow: Callable[[Callable[[], Versions]], Follower] | None = None,
    ) -> None:
        self.version: str | int = manifest.version
        self.tables: dict[str, ServedTable] = dict(manifest.tables)
        self.device = torch.device(manifest.device)
        self.inputs: list[Input] = [i for i in manifest.inputs if i.dtype is not None]
        self._leaves = manifest.inputs
        self._counted = manifest.missing
        self._missing = torch.zeros(len(manifest.missing or ()), dtype=torch.int64)
        self._counting = threading.Lock()
        self._base = manifest.base
        self._versions: Versions | None = versions
        # weak: this model has the follower, and its memory should go when nobody has the model
        opened = partial(_versions_of, weakref.ref(self))
        self._follower = None if follow is None else follow(opened)
        with versions.reading() as loaded:
            in_spec, out_spec = loaded.loader.get_call_spec()
        self._in_spec = pytree.treespec_loads(in_spec)
        self._out_spec = pytree.treespec_loads(out_spec)

    def run(self, *inputs: Any) -> Any:
        """What the model returns for some inputs.

        Args:
            *inputs: put together as ``example_inputs`` of the export, with tensors of their dtypes
                and shapes; sizes that ``dynamic_shapes`` named may be others.

        Returns:
            What the model's forward returned in Python.

        Raises:
            TypeError: the inputs are put together in another way, or have other dtypes.
            ValueError: a tensor has another shape, or is on another device.
            RuntimeError: the model is closed; or an op refuses its input.
        """
        leaves = leaves_of(self._in_spec, inputs)
        outputs = self._run(tensors_of(self._leaves, leaves, self.device))
        result = pytree.tree_unflatten(outputs, self._out_spec)
        if self._counted is None:
            return result
        output, counts = result
        self._count(counts)
        return output

    def run_flat(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As :meth:`run`, for a program that knows nothing of how inputs are put together.

        Args:
            tensors: one for each of :attr:`inputs`.

        Returns:
            The tensors of the output, from left to right.

        Raises:
            TypeError: their number, or a dtype, is another.
            ValueError: a tensor has another shape, or is on another device.
            RuntimeError: the model is closed; or an op refuses its input.
        """
        if len(tensors) != len(self.inputs):
            names = [given.name for given in self.inputs]
            raise TypeError(f"run_flat: got {len(tensors)} tensors, expected one each of {names}")
        outputs = self._run(tensors_of(self.inputs, tensors, self.device))
        if self._counted is not None:
            self._count(outputs.pop())
        return outputs

    def apply(
        self, table: str, ids: Tensor, rows: Tensor, *, erased: Tensor | None = None
    ) -> LiveUpdate:
        """Gives ids their rows, and takes others out, while threads run. All of it, or nothing.

        A run that goes on meanwhile gets of each id the row from before or from after the update,
        never a part of both, and of several ids rows of both. A run that begins later gets the new
        ones. Threads that update take turns. Rows are quantized where those of the package are. A
        model that follows a delta log with its dense part makes a version of each update, which
        runs get as a whole.

        Args:
            table: its name in :attr:`tables`.
            ids: int64 [n]; those that are not there are inserted. Of an id that is there several
                times the last row counts.
            rows: float32, bfloat16 or float16 [n, embedding_dim].
            erased: int64 [m], ids to take out before; those that are not there, or are in ``ids``,
                are passed over.

        Returns:
            How many ids were inserted, updated and erased.

        Raises:
            TypeError, ValueError: a table that there is not; dtype or shape of a tensor.
            NoHeadroomError: new ids want more rows than the table has; nothing has changed.
            RuntimeError: the package was exported without ``headroom=``; the model is closed; a
                padding id, or a row that the format cannot hold. Nothing has changed.
        """
        # copies, which the other version takes later
        given = [of.clone() if isinstance(of, Tensor) else of for of in (ids, rows, erased)]
        return self._open("apply").change(lambda loaded: loaded.live.update(table, *given))

    def erase(self, table: str, ids: Tensor) -> int:
        """Takes ids out of a table while threads run; their rows are free for others.

        Args:
            table: its name in :attr:`tables`.
            ids: int64 [n]; those that are not there are passed over.

        Returns:
            How many were there.

        Raises:
            TypeError, ValueError: a table that there is not; dtype or shape of ids.
            RuntimeError: the package was exported without ``headroom=``, or the model is closed.
        """
        given = ids.clone() if isinstance(ids, Tensor) else ids
        return self._open("erase").change(lambda loaded: loaded.live.erase(table, given))

    def stats(self) -> dict[str, LiveStats]:
        """Ids, free rows and updates of the tables that take updates, by name.

        It is empty where the package was exported without ``headroom=``.

        Raises:
            RuntimeError: the model is closed.
        """
        with self._open("stats").reading() as loaded:
            stats = loaded.live.stats()
        return {name: of._replace(dense_behind=self.dense_behind) for name, of in stats.items()}

    @property
    def follower(self) -> Follower:
        """What applies the commits of the delta log: ``update()``, or ``start()`` for a thread.

        A commit is taken as a whole or refused, and then the rows from before go on being served.
        A run reads rows and dense part of one commit. With ``dense="keep"`` the dense part stays
        that of the export, and runs get rows of a commit one after another, as with :meth:`apply`.

        Raises:
            RuntimeError: the package was loaded without ``follow=``.
        """
        if self._follower is None:
            raise RuntimeError(
                "follower: this model follows no delta log: give follow= to serving.load"
            )
        return self._follower

    @property
    def sequence(self) -> int | None:
        """Number of the commit of the delta log whose rows are served.

        None: the rows are those of the base checkpoint, or the package has no base.
        """
        if self._follower is not None:
            return self._follower.sequence
        return None if self._base is None else self._base.sequence

    @property
    def dense_version(self) -> str | int:
        """The version of all that is not a row of a table.

        It is that of the export, whatever rows are updated. A model that follows a delta log with
        its dense part adds the number of the commit, such as ``"monday+17"``.
        """
        if self._follower is None or self._follower.dense == "keep" or self.sequence is None:
            return self.version
        return f"{self.version}+{self.sequence}"

    @property
    def dense_behind(self) -> int:
        """How many commits that changed the dense part were applied without it; 0: it is current.

        Only ``dense="keep"`` of :func:`load` leaves it behind.
        """
        return 0 if self._follower is None else self._follower.dense_behind

    @property
    def missing(self) -> dict[str, int]:
        """How many ids runs have not found since the load, by name of the table.

        Occurrences of ids that are not in a table; its padding id is none.

        Raises:
            RuntimeError: the package does not count them.
        """
        if self._counted is None:
            raise RuntimeError(
                "missing: the package does not count ids that are not found: export the model with "
                "missing=True"
            )
        with self._counting:
            return dict(zip(self._counted, self._missing.tolist(), strict=True))

    def _count(self, counts: Tensor) -> None:
        """Adds what a run has not found."""
        with self._counting:
            self._missing += counts.to(self._missing.device)

    def _run(self, tensors: list[Tensor]) -> list[Tensor]:
        with self._open("run").reading() as loaded:
            outputs = loaded.loader.boxed_run(tensors)
            if loaded.memory is None:
                return outputs
            # an output that is a constant, or a part of one, has to outlive the tables
            return [o.clone() if loaded.memory.has(o) else o for o in outputs]

    def _open(self, method: str) -> Versions:
        versions = self._versions
        if versions is None:
            raise _closed(method)
        return versions

    __call__ = run

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._versions is None

    def close(self) -> None:
        """Gives the memory of the tables back, when runs of other threads have ended.

        A thread of :attr:`follower` is ended; what had ended it before, ``follower.check()`` tells.
        """
        if self._follower is not None:
            with suppress(Exception):
                self._follower.stop()
        self._versions = None

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        takes = ", ".join(
            f"{given.name}: {str(given.dtype).removeprefix('torch.')} {shape_text(given.sizes)}"
            for given in self.inputs
        )
        state = " closed," if self.closed else ""
        return f"ServedModel({state}version={self.version!r}, inputs=[{takes}])"


def _versions_of(reference: weakref.ref[ServedModel]) -> Versions:
    """What the follower of a model changes."""
    model = reference()
    if model is None:
        raise _closed("follow")
    return model._open("follow")


def _closed(method: str) -> RuntimeError:
    return RuntimeError(
        f"{method}: this model is closed, and its tables are gone: load the package again"
    )


__all__ = ["ServedModel"]
