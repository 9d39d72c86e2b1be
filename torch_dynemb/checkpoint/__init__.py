"""Checkpoints: saved tables as files, and what these hold.

:func:`save` and :func:`load` write and read a model with its tables on any number of ranks;
:func:`open` reads a checkpoint without a model, :func:`reshard` writes it for other ranks, and
:func:`export` for other programs. ``python -m torch_dynemb checkpoint`` does so as well.
"""

from torch_dynemb.checkpoint.files.summed_files import DamagedFileError
from torch_dynemb.checkpoint.loading.load import LoadedTable, LoadReport, load
from torch_dynemb.checkpoint.parts import IdSlots, TablePart, table_name, tables_of
from torch_dynemb.checkpoint.reading.reader import Checkpoint, open  # noqa: A004
from torch_dynemb.checkpoint.reading.saved_table import CheckpointTable, SavedBatch
from torch_dynemb.checkpoint.saving.handle import SaveHandle
from torch_dynemb.checkpoint.saving.save import save
from torch_dynemb.checkpoint.tools.export import export
from torch_dynemb.checkpoint.tools.reshard import reshard

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
