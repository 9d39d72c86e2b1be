"""Checkpoints: saved tables as files, and what these hold.

:func:`save` and :func:`load` write and read a model with its tables on any number of ranks;
:func:`open` reads a checkpoint without a model, :func:`reshard` writes it for other ranks, and
:func:`export` for other programs. ``python -m torch_dynemb checkpoint`` does so as well.
"""

from torch_dynemb.checkpoint.export import export
from torch_dynemb.checkpoint.handle import SaveHandle
from torch_dynemb.checkpoint.load import LoadedTable, LoadReport, load
from torch_dynemb.checkpoint.parts import IdSlots, TablePart, table_name, tables_of
from torch_dynemb.checkpoint.reader import Checkpoint, open  # noqa: A004
from torch_dynemb.checkpoint.reshard import reshard
from torch_dynemb.checkpoint.save import save
from torch_dynemb.checkpoint.saved_table import CheckpointTable, SavedBatch
from torch_dynemb.checkpoint.summed_files import DamagedFileError

__all__ = [
    "Checkpoint",
    "CheckpointTable",
    "DamagedFileError",
    "IdSlots",
    "LoadReport",
    "LoadedTable",
    "SaveHandle",
    "SavedBatch",
    "TablePart",
    "export",
    "load",
    "open",
    "reshard",
    "save",
    "table_name",
    "tables_of",
]
