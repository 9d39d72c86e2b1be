"""Sync of dynamic tables between sharding groups: 2D parallelism.

Each sharding group has the whole model. Ranks with the same shard are a replica group. A sync moves
what the groups have touched since the last one::

    CommonBase      content that the groups had in common, and what this group has touched since
    PeerExchange    bytes to and from the ranks of a replica group
    TableMerge      one table: its union of ids, its records, the merge, the update
    ReplicaSync     the steps of all tables, in one order on all ranks
"""
