"""Logs of the changes of training, which other models follow.

:class:`DeltaLog` publishes changes during training, :func:`follow` and :func:`replay` apply them to
other models, and :func:`resume` lets training go on from the last commit. A log lies in a
directory, at a URL, or in a sink such as :class:`RedisSink`. :class:`RedisRows` keeps its rows for
programs without PyTorch.
"""

from torch_dynemb.changes.commits import Commit, TableDelta
from torch_dynemb.delta_log.directory import DirectorySink
from torch_dynemb.delta_log.follower import Follower, follow, replay
from torch_dynemb.delta_log.log import DeltaLog
from torch_dynemb.delta_log.redis.rows import RedisRows
from torch_dynemb.delta_log.redis.sink import RedisSink
from torch_dynemb.delta_log.resume import resume
from torch_dynemb.delta_log.sink import DeltaSink, EndingSink, LockingSink
from torch_dynemb.delta_log.targets import FollowTarget
from torch_dynemb.errors import NewBaseNeededError

__all__ = [
    "Commit",
    "DeltaLog",
    "DeltaSink",
    "DirectorySink",
    "EndingSink",
    "FollowTarget",
    "Follower",
    "LockingSink",
    "NewBaseNeededError",
    "RedisRows",
    "RedisSink",
    "TableDelta",
    "follow",
    "replay",
    "resume",
]
