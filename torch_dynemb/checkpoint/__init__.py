"""Checkpoints: saved tables as files, and what these hold.

:func:`save` and :func:`load` write and read a model with its tables on any number of ranks.
"""

from torch_dynemb.checkpoint.handle import SaveHandle
from torch_dynemb.checkpoint.load import LoadedTable, LoadReport, load
from torch_dynemb.checkpoint.parts import IdSlots, TablePart, table_name, tables_of
from torch_dynemb.checkpoint.save import save
from torch_dynemb.checkpoint.summed_files import DamagedFileError

__all__ = [
    "DamagedFileError",
    "IdSlots",
    "LoadReport",
    "LoadedTable",
    "SaveHandle",
    "TablePart",
    "load",
    "save",
    "table_name",
    "tables_of",
]
