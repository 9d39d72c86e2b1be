"""Reader of a checkpoint without a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from types import MappingProxyType
from typing import Any

import torch

from torch_dynemb.checkpoint.file_names import DELTA
from torch_dynemb.checkpoint.manifest.file import is_replaced, read_manifest
from torch_dynemb.checkpoint.manifest.records import Manifest
from torch_dynemb.checkpoint.reading.changed_table import ChangedTable, ChangesFile, changes_of
from torch_dynemb.checkpoint.reading.dense_files import read_all, read_state
from torch_dynemb.checkpoint.reading.saved_table import (
    CheckpointFiles,
    CheckpointTable,
    Closes,
    Opened,
)
from torch_dynemb.console.progress import progress_bar
from torch_dynemb.errors import DamagedFileError, ReplacedError
from torch_dynemb.files.checksummed_files import ChecksummedReader
from torch_dynemb.files.locations import Location, checked_location
from torch_dynemb.process.torch_modes import plain_torch


class Checkpoint:
    """Content of a checkpoint; :func:`torch_dynemb.checkpoint.open` creates it.

    As a context manager, it closes its files at the end.

    Args:
        folder: folder of the checkpoint.
        manifest: its manifest.

    Attributes:
        folder: path or URL of the checkpoint.
        manifest: list of its files and their content.
        uuid: unique id of the checkpoint.
        kind: ``"full"``, or ``"delta"``: an increment, with tables of changed ids.
        parent: uuid of the checkpoint that an increment continues; None for a whole one.
        ranks: number of ranks that saved it.
        tables: tables by name.

    Raises:
        DamagedFileError: a batch of an increment is damaged or missing.
    """

    def __init__(self, folder: Location, manifest: Manifest) -> None:
        self._readers: list[Closes] = []
        self._closed = False
        batches: list[ChangesFile] = []
        self.folder, self.uuid = folder, manifest.uuid
        if manifest.kind == DELTA:
            with self._reading():
                batches, manifest = changes_of(folder, manifest)
        self.manifest = manifest
        self.kind, self.ranks = manifest.kind, manifest.ranks
        self.parent = manifest.parent
        files = CheckpointFiles(folder, self._opened)
        self.tables: Mapping[str, CheckpointTable] = MappingProxyType(
            {
                name: ChangedTable(name, table, files, batches)
                if batches
                else CheckpointTable(name, table, files)
                for name, table in manifest.tables.items()
            }
        )

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.folder)!r}, tables={list(self.tables)})"

    @contextmanager
    def _opened(self, rows: Opened) -> Iterator[Opened]:
        self._readers.append(rows)
        try:
            with self._reading():
                yield rows
        finally:
            self._readers = [of for of in self._readers if of is not rows]
            rows.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise ReplacedError instead of DamagedFileError if another checkpoint has taken its
        place.
        """
        if self._closed:
            raise ValueError(f"checkpoint {self.folder} is closed: open it again to read of it")
        try:
            yield
        except DamagedFileError as error:
            if is_replaced(self.folder, self.uuid):
                raise ReplacedError(
                    f"checkpoint {self.folder} was replaced or removed while it was read: open it "
                    "again",
                    path=self.folder,
                ) from error
            raise

    @plain_torch()
    def dense(self) -> dict[str, Any]:
        """Read the dense state of the model, combined from the shards of all ranks.

        Returns:
            CPU tensors by their names in the model's state dict, and its entries other than
            tensors.

        Raises:
            DamagedFileError: a file is damaged or missing.
            ValueError: the checkpoint is closed.
            ReplacedError: another checkpoint has taken its place.
        """
        with self._reading():
            return read_all(self.folder, self.manifest.dense)

    @property
    @plain_torch()
    def state(self) -> Any:
        """The ``state`` that was given to :func:`torch_dynemb.checkpoint.save`.

        Each access reads it again. A damaged file raises DamagedFileError.
        """
        with self._reading():
            return read_state(self.folder, self.manifest.state)

    @plain_torch()
    def verify(self, *, progress: bool | None = None) -> None:
        """Read every file once and compare it with its checksums.

        Args:
            progress: show a progress bar; default: if the standard error is a terminal.

        Raises:
            DamagedFileError: a file is damaged or missing; the message names it and the reason.
            ValueError: the checkpoint is closed.
            ReplacedError: another checkpoint has taken its place.
        """
        files = self.manifest.files()
        buffer = torch.empty(
            max((of.block_bytes for of in files), default=0), dtype=torch.uint8, device="cpu"
        )
        total = sum(file.bytes for file in files)
        bars = progress_bar(f"verifying {self.folder.name}", total, progress)
        with self._reading(), bars as bar:
            for file in files:
                reader = ChecksummedReader(self.folder / file.path, file.sums, has_header=False)
                try:
                    for number in range(len(file.crc32c)):
                        size = min(file.block_bytes, file.bytes - number * file.block_bytes)
                        reader.expect_blocks(number)
                        reader.read_block(number, buffer[:size])
                        bar.update(size)
                finally:
                    reader.close()

    def close(self) -> None:
        """Close all files. Iterators of batches then raise an error."""
        self._closed = True
        for rows in self._readers:
            rows.close()
        self._readers = []

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open(path: str | PathLike[str]) -> Checkpoint:  # noqa: A001
    """Open a checkpoint to read it without a model, on any machine, batch by batch.

    Only the manifest is read, and the places of records in an increment.

    Args:
        path: path or URL of the checkpoint; see :func:`torch_dynemb.checkpoint.save`.

    Returns:
        Access to its content.

    Raises:
        TypeError: ``path`` is not a path.
        FileNotFoundError: ``path`` is not a checkpoint.
        DamagedFileError: the manifest or a batch of an increment is damaged.
        UnsupportedFormatError: it has another format version.

    Example:
        >>> import tempfile, torch, torch_dynemb as td
        >>> bags = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.Adam(lr=0.1))
        >>> bags(torch.tensor([[1, 2], [3, 1]])).sum().backward()
        >>> folder = tempfile.TemporaryDirectory()
        >>> handle = td.checkpoint.save(folder.name + "/last", bags, state={"epoch": 1})
        >>> with td.checkpoint.open(folder.name + "/last") as saved:
        ...     print(saved.tables["embedding"], saved.state)
        ...     print(sum(batch.ids.numel() for batch in saved.tables["embedding"].batches(2)))
        CheckpointTable('embedding', ids=3, embedding_dim=4, dtype=torch.float32) {'epoch': 1}
        3
        >>> folder.cleanup()
    """
    folder = checked_location("checkpoint.open", path)
    return Checkpoint(folder, read_manifest(folder))


__all__ = ["Checkpoint", "open"]
