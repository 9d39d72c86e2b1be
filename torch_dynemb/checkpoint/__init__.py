"""Checkpoints, delta logs and snapshots of models with tables.

:func:`save` and :func:`load` write and read a model with its tables on any number of ranks.
After :func:`record_changes`, :func:`save` can write an increment: only what has changed since
another checkpoint. :func:`merge` folds increments into a whole checkpoint.

:func:`save_with` has Hugging Face's accelerate do so.

:func:`open` reads a checkpoint without a model, :func:`reshard` rewrites it for another number of
ranks, and :func:`export` writes it for other programs. ``python -m torch_dynemb checkpoint`` does
the same from a shell.

:class:`DeltaLog` publishes changes during training, :func:`follow` applies them to other models,
and :func:`resume` lets training go on from the last commit. :func:`save_snapshot`,
:func:`load_snapshot` and :func:`snapshots` are for models with rows on disks.
"""

from torch_dynemb.checkpoint.accelerate_hooks import save_with
from torch_dynemb.checkpoint.delta_log.commits import Commit, TableDelta
from torch_dynemb.checkpoint.delta_log.directory import DirectorySink
from torch_dynemb.checkpoint.delta_log.follower import Follower, follow, replay
from torch_dynemb.checkpoint.delta_log.log import DeltaLog
from torch_dynemb.checkpoint.delta_log.resume import resume
from torch_dynemb.checkpoint.delta_log.sink import DeltaSink, EndingSink, LockingSink
from torch_dynemb.checkpoint.delta_log.targets import FollowTarget
from torch_dynemb.checkpoint.loading.load import LoadReport, load
from torch_dynemb.checkpoint.reading.reader import Checkpoint, open  # noqa: A004
from torch_dynemb.checkpoint.reading.saved_table import CheckpointTable
from torch_dynemb.checkpoint.redis.rows import RedisRows
from torch_dynemb.checkpoint.redis.sink import RedisSink
from torch_dynemb.checkpoint.saving.handle import SaveHandle
from torch_dynemb.checkpoint.saving.increments import record_changes
from torch_dynemb.checkpoint.saving.save import save
from torch_dynemb.checkpoint.snapshots.load import load_snapshot, snapshots
from torch_dynemb.checkpoint.snapshots.save import save_snapshot
from torch_dynemb.checkpoint.tools.export import export
from torch_dynemb.checkpoint.tools.merge import merge
from torch_dynemb.checkpoint.tools.reshard import reshard
from torch_dynemb.errors import DamagedFileError, NewBaseNeededError
from torch_dynemb.parts.table_parts import TablePart, table_name
from torch_dynemb.table.shards import IdSlots

__all__ = [
    "Checkpoint",
    "CheckpointTable",
    "Commit",
    "DamagedFileError",
    "DeltaLog",
    "DeltaSink",
    "DirectorySink",
    "EndingSink",
    "FollowTarget",
    "Follower",
    "IdSlots",
    "LoadReport",
    "LockingSink",
    "NewBaseNeededError",
    "RedisRows",
    "RedisSink",
    "SaveHandle",
    "TableDelta",
    "TablePart",
    "export",
    "follow",
    "load",
    "load_snapshot",
    "merge",
    "open",
    "record_changes",
    "replay",
    "reshard",
    "resume",
    "save",
    "save_snapshot",
    "save_with",
    "snapshots",
    "table_name",
]
