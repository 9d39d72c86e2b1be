"""A loaded package: runs, and updates of its rows."""

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

from torch_dynemb._library.library import raises_typed_errors
from torch_dynemb.delta_log.follower import Follower
from torch_dynemb.ops import RowFileStats
from torch_dynemb.serving.live_state import LiveUpdate
from torch_dynemb.serving.packages.inputs import Input, InputChecks, shape_text
from torch_dynemb.serving.packages.live_package import LiveStats
from torch_dynemb.serving.packages.manifest import PackageManifest, ServedTable
from torch_dynemb.serving.packages.structure import Structure
from torch_dynemb.serving.packages.versions import ServedPosition, Versions


class ServedModel:
    """A loaded model of a package. Any number of threads may run it.

    Made by :func:`load`. As a context manager it is closed at the end. If the package was exported
    with ``headroom=``, its rows may be updated while threads run it. Its dense state changes by the
    commits of a delta log only.

    Args:
        manifest: of the package.
        versions: the compiled code, with its constants.
        follow: makes :attr:`follower` from a function that returns the versions while the model is
            open; None: it follows no delta log.

    Attributes:
        version: name of this version of the model, given at the export. Updates of rows do not
            change it; :meth:`stats` counts them.
        tables: number of ids at the time of the export, and columns, by name of the table.
        device: device of the inputs.
        inputs: name, dtype and sizes of the tensors that the model takes, in the order of
            :meth:`run_flat`.
        outputs: likewise of the tensors that it returns.
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
        self.outputs: list[Input] = manifest.outputs
        self._leaves = InputChecks(manifest.inputs, self.device)
        self._tensors = InputChecks(self.inputs, self.device)
        self._counted = manifest.missing
        self._missing = torch.zeros(len(manifest.missing or ()), dtype=torch.int64, device="cpu")
        self._counting = threading.Lock()
        self._base = manifest.base
        self._versions: Versions | None = versions
        # weak: this model owns the follower, and its memory should be freed with the model
        opened = partial(_versions_of, weakref.ref(self))
        self._follower = None if follow is None else follow(opened)
        with versions.reading() as loaded:
            in_spec, out_spec = loaded.loader.get_call_spec()
        self._structure = Structure(pytree.treespec_loads(in_spec))
        self._out_spec = pytree.treespec_loads(out_spec)

    def run(self, *inputs: Any) -> Any:
        """Run the model.

        Args:
            *inputs: structured as ``example_inputs`` of the export, with tensors of their dtypes
                and shapes; sizes named in ``dynamic_shapes`` may differ.

        Returns:
            The output of the model's forward in Python.

        Raises:
            TypeError: the inputs have another structure or other dtypes.
            ValueError: a tensor has another shape, or is on another device.
            RuntimeError: the model is closed; or an op refuses its input.
        """
        outputs = self._run(self._leaves.tensors(self._structure.leaves(inputs)))
        result = pytree.tree_unflatten(outputs, self._out_spec)
        if self._counted is None:
            return result
        output, counts = result
        self._count(counts)
        return output

    def run_flat(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the model on a flat list of tensors, without the structure of its inputs.

        Args:
            tensors: one for each of :attr:`inputs`.

        Returns:
            The tensors of the output, from left to right.

        Raises:
            TypeError: their number or a dtype differs.
            ValueError: a tensor has another shape, or is on another device.
            RuntimeError: the model is closed; or an op refuses its input.
        """
        if len(tensors) != len(self.inputs):
            names = [given.name for given in self.inputs]
            raise TypeError(f"run_flat: got {len(tensors)} tensors, expected one each of {names}")
        outputs = self._run(self._tensors.tensors(tensors))
        if self._counted is not None:
            self._count(outputs.pop())
        return outputs

    def apply(
        self, table: str, ids: Tensor, rows: Tensor, *, erased: Tensor | None = None
    ) -> LiveUpdate:
        """Write rows of ids and remove other ids, while threads run.

        All of the update is applied, or nothing. A run during the update reads each row from before
        or from after it, never a part of both; different rows may be of both. Later runs read the
        new rows. Threads that update take turns. Rows are quantized if those of the package are. A
        model that follows a delta log with its dense state makes a version of each update, which
        runs read as a whole.

        Args:
            table: name of the table in :attr:`tables`.
            ids: int64 [n]; missing ids are inserted. The last row counts if an id occurs several
                times.
            rows: float32, bfloat16 or float16 [n, embedding_dim].
            erased: int64 [m], ids to remove first; missing ids and those in ``ids`` are skipped.

        Returns:
            The number of ids inserted, updated and erased.

        Raises:
            TypeError, ValueError: an unknown table; dtype or shape of a tensor.
            NoHeadroomError: new ids need more rows than the table has; nothing has changed.
            RuntimeError: the package was exported without ``headroom=``; the model is closed; a
                padding id, or a row that the format cannot hold. Nothing has changed.
        """
        # copies, which the other version takes later
        given = [of.clone() if isinstance(of, Tensor) else of for of in (ids, rows, erased)]
        return self._open("apply").change(lambda loaded: loaded.live.update(table, *given))

    def erase(self, table: str, ids: Tensor) -> int:
        """Remove ids from a table while threads run; their rows become free.

        Args:
            table: name of the table in :attr:`tables`.
            ids: int64 [n]; missing ids are skipped.

        Returns:
            The number of ids removed.

        Raises:
            TypeError, ValueError: an unknown table; dtype or shape of ids.
            RuntimeError: the package was exported without ``headroom=``, or the model is closed.
        """
        given = ids.clone() if isinstance(ids, Tensor) else ids
        return self._open("erase").change(lambda loaded: loaded.live.erase(table, given))

    def stats(self) -> dict[str, LiveStats]:
        """Return ids, free rows and updates of the tables that take updates, by name.

        Empty if the package was exported without ``headroom=``.

        Raises:
            RuntimeError: the model is closed.
        """
        with self._open("stats").reading() as loaded:
            stats = loaded.live.stats()
        return {name: of._replace(dense_behind=self.dense_behind) for name, of in stats.items()}

    def row_files(self) -> dict[str, RowFileStats]:
        """Return hits, misses and reads of each file of rows, by its name in the package.

        They count from the first use of the file in this process; models that share it count
        together. Empty if all rows are in memory.

        Raises:
            RuntimeError: the model is closed.
        """
        result: dict[str, RowFileStats] = {}
        opened = self._open("row_files").opened()  # two copies may have files of their own
        for file in {of.use: of for of in opened}.values():
            before = result.get(file.name, (0,) * len(RowFileStats._fields))
            result[file.name] = RowFileStats(*map(sum, zip(before, file.stats(), strict=True)))
        return result

    @property
    def follower(self) -> Follower:
        """The follower of the delta log: ``update()``, or ``start()`` for a thread.

        A commit is applied as a whole or refused; then the earlier rows stay in service. A run
        reads rows and dense state of one commit. With ``dense="keep"`` the dense state stays that
        of the export, and runs read rows of a commit one after another, as with :meth:`apply`.

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
        """Number of the commit of the delta log that the served rows have.

        None: the rows are those of the base checkpoint, or the package has no base.
        """
        if (shared := self._shared) is not None:
            return shared.sequence
        if self._follower is not None:
            return self._follower.sequence
        return None if self._base is None else self._base.sequence

    @property
    def dense_version(self) -> str | int:
        """Version of the dense state.

        This is the version of the export, whatever rows are updated. A model that follows a delta
        log with its dense state appends the number of the commit, such as ``"monday+17"``.
        """
        shared = self._shared
        keeps = self._follower is None or self._follower.dense == "keep"
        if shared is not None:
            keeps = not shared.follows_dense
        sequence = self.sequence if shared is None else shared.sequence
        return self.version if keeps or sequence is None else f"{self.version}+{sequence}"

    @property
    def commit_age(self) -> float | None:
        """Seconds since the last commit of the delta log was applied; None if there was none.

        With ``shared_memory=`` any process may have applied it. More than the trainer's interval
        means that the trainer, or the process that follows, has stopped.
        """
        if (shared := self._shared) is not None:
            return shared.age
        return None if self._follower is None else self._follower.commit_age

    @property
    def dense_behind(self) -> int:
        """Number of commits applied without their changes of the dense state; 0: it is current.

        It is 0 except with ``dense="keep"`` of :func:`load`, there or in the process that follows.
        """
        if (shared := self._shared) is not None:
            return shared.dense_behind
        return 0 if self._follower is None else self._follower.dense_behind

    @property
    def _shared(self) -> ServedPosition | None:
        """Position of tables that several processes share."""
        return None if self._versions is None else self._versions.position()

    @property
    def missing(self) -> dict[str, int]:
        """Return the number of missing ids in runs since the load, by name of the table.

        Counted are occurrences of ids that are not in a table, except its padding id.

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

    @property
    def counts_missing(self) -> bool:
        """Whether the package counts missing ids: it was exported with ``missing=True``."""
        return self._counted is not None

    def _count(self, counts: Tensor) -> None:
        """Add the missing ids of a run."""
        with self._counting:
            self._missing += counts.to(self._missing.device)

    @raises_typed_errors
    def _run(self, tensors: list[Tensor]) -> list[Tensor]:
        with self._open("run").reading() as loaded:
            with loaded.running:
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
        """True after :meth:`close`."""
        return self._versions is None

    def close(self) -> None:
        """Free the memory of the tables, after runs of other threads have ended.

        This ends a thread of :attr:`follower`; ``follower.check()`` raises an earlier error of it.
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
    """Return the versions that the follower of a model changes."""
    model = reference()
    if model is None:
        raise _closed("follow")
    return model._open("follow")


def _closed(method: str) -> RuntimeError:
    return RuntimeError(
        f"{method}: this model is closed, and its tables are gone: load the package again"
    )


__all__ = ["ServedModel"]
