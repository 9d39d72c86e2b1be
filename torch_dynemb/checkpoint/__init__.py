"""Checkpoints and snapshots of models with tables.

:func:`save` and :func:`load` write and read a model with its tables on any number of ranks.
After :func:`record_changes`, :func:`save` can write an increment: only what has changed since
another checkpoint. :func:`merge` folds increments into a whole checkpoint.

:func:`save_with` has Hugging Face's accelerate do so.

:func:`open` reads a checkpoint without a model, :func:`reshard` rewrites it for another number of
ranks, and :func:`export` writes it for other programs. ``python -m torch_dynemb checkpoint`` does
the same from a shell.

:func:`save_snapshot`, :func:`load_snapshot` and :func:`snapshots` are for models with rows on
disks.
"""

from torch_dynemb.checkpoint.accelerate_hooks import save_with
from torch_dynemb.checkpoint.loading.load import LoadReport, load
from torch_dynemb.checkpoint.reading.reader import Checkpoint, open  # noqa: A004
from torch_dynemb.checkpoint.reading.saved_table import CheckpointTable
from torch_dynemb.checkpoint.saving.handle import SaveHandle
from torch_dynemb.checkpoint.saving.increments import record_changes
from torch_dynemb.checkpoint.saving.save import save
from torch_dynemb.checkpoint.snapshots.load import load_snapshot, snapshots
from torch_dynemb.checkpoint.snapshots.save import save_snapshot
from torch_dynemb.checkpoint.tools.export import export
from torch_dynemb.checkpoint.tools.merge import merge
from torch_dynemb.checkpoint.tools.reshard import reshard
from torch_dynemb.errors import DamagedFileError
from torch_dynemb.parts.table_parts import TablePart, table_name
from torch_dynemb.table.shards import IdSlots

__all__ = [
    "Checkpoint",
    "CheckpointTable",
    "DamagedFileError",
    "IdSlots",
    "LoadReport",
    "SaveHandle",
    "TablePart",
    "export",
    "load",
    "load_snapshot",
    "merge",
    "open",
    "record_changes",
    "reshard",
    "save",
    "save_snapshot",
    "save_with",
    "snapshots",
    "table_name",
]
