"""Environments of 2D parallelism: sharding groups of ranks that each have the whole model."""

from __future__ import annotations

import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D


class SyncedEnv2D(ShardingEnv2D):  # type: ignore[misc]
    """Environment of sharding groups that keep their dynamic tables equal."""

    @classmethod
    def of(cls, env: ShardingEnv2D) -> SyncedEnv2D:
        """Return an environment with the attributes of another one.

        Args:
            env: that DMPCollection has made.
        """
        synced = cls.__new__(cls)
        synced.__dict__.update(env.__dict__)
        return synced


def sharding_group(env: ShardingEnv) -> dist.ProcessGroup:
    """Return the ranks that share the tables of an environment, each with some rows or columns.

    Args:
        env: of a sharded module.
    """
    group: dist.ProcessGroup = (
        env.sharding_pg if isinstance(env, ShardingEnv2D) else env.process_group
    )
    return group


__all__ = ["SyncedEnv2D", "sharding_group"]
