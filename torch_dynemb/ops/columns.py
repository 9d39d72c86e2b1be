"""Columns of the descriptor tensors; the C++ side has them in ``csrc/core/columns.h``."""

from __future__ import annotations

from enum import IntEnum

BUCKET_WIDTH = 4
BUCKET_WORDS = 2 * BUCKET_WIDTH
MIN_BUCKETS = 64 // BUCKET_WIDTH  # of a table's index
MAX_LOAD_PERCENT = 70
PARTITIONS = 64  # larger indexes have a multiple of so many buckets
GENERATION_BITS = 28
GENERATION_MASK = (1 << GENERATION_BITS) - 1
DIRTY_MARK = 1 << GENERATION_BITS  # of a slot's marks
MAX_ROWS = (1 << 35) - 1
NO_HANDLE = -1
PADDING_HANDLE = -2
REFUSED_HANDLE = -3
FREE_STEP = (1 << 63) - 1  # of a free slot that an id has left, on the CPU; other free slots have 0
STEP_AGES = 1 << 32  # evictions distinguish steps that are at most this old
COMMIT_STEP_BYTES = 64 << 20
MAX_COUNT = 1 << 62  # largest count: far from overflow


def buckets_for(ids: int) -> int:
    """Return the least number of buckets for ``ids`` ids (core/index/bucket.h).

    Args:
        ids: of a table.
    """
    buckets = -(-ids * 100 // (MAX_LOAD_PERCENT * BUCKET_WIDTH))
    unit = MIN_BUCKETS if buckets <= PARTITIONS else PARTITIONS
    return max(MIN_BUCKETS, -(-buckets // unit) * unit)


class Meta(IntEnum):
    """Columns of ``meta``, int64 [tables, 16]: constants of a table.

    An initializer is a range of the records in ``init_data``: the number of its first element, and
    how many records there are (:meth:`torch_dynemb.initializers.InitData.add` gives both).

    Attributes:
        SEED: of the initial values, which are a function of seed, id and column.
        SLAB: which of ``weights``, ``generations`` and so on has the rows.
        DIM: columns of a row, equal to those of the slab's weights.
        HAS_PADDING, PADDING_ID: 1 where lookups of an id give zeros and no gradient; that id.
        INIT_BEGIN, INIT_COUNT: initializer of new ids.
        DEFAULT_BEGIN, DEFAULT_COUNT: initializer of ids that are read but have no row.
        REGION_BEGIN, REGION_BUCKETS: the part of ``buckets`` in which the table's index grows:
            first row, and the most buckets that it may have (:func:`buckets_for`).
        REFUSED_BEGIN, REFUSED_COUNT: initializer of ids that were refused a row.
        UNSCORED: 1 for a table that counts ids waiting for admission: it has no rows.
        FIRST_COLUMN: where the rows begin in those of a wider table, of which this one is a part.
        TIERED: 1 where the slab is a cache of rows in a store.
    """

    SEED = 0
    SLAB = 1
    DIM = 2
    HAS_PADDING = 3
    PADDING_ID = 4
    INIT_BEGIN = 5
    INIT_COUNT = 6
    DEFAULT_BEGIN = 7
    DEFAULT_COUNT = 8
    REGION_BEGIN = 9
    REGION_BUCKETS = 10
    REFUSED_BEGIN = 11
    REFUSED_COUNT = 12
    UNSCORED = 13
    FIRST_COLUMN = 14
    TIERED = 15


META_COLUMNS = 16


class CopyOnWrite(IntEnum):
    """First words of a slab's copy-on-write vector; see ``csrc/core/rows/copy_on_write.h``."""

    ACTIVE = 0
    ROWS = 1
    PLACES = 2
    ROW_BYTES = 3
    MARKS = 4
    FREE = 5
    BUFFER = 6
    TAKEN = 8
    GIVEN = 16
    WAITS = 24


COPY_ON_WRITE_COLUMNS = 32


class CopyMark(IntEnum):
    """States of a row during copy-on-write; other values are its place in the buffer + 1."""

    READ = -2
    COPYING = -1
    UNREAD = 0


class Table(IntEnum):
    """Columns of ``tables``, int64 [tables, 16]: the index state of a table.

    Attributes:
        BUCKET_COUNT: buckets in use; of a new table ``MIN_BUCKETS``.
        SIZE: ids.
        TOMBSTONES: slots of erased ids that are not free yet.
        INSERTED, ERASED, EVICTED: ids, counted since the table was made.
        GROWTHS: number of rehashes.
        REJECTED, NOT_ADMITTED: new ids without room; new ids that were not admitted.
        FOUND, MISSED: occurrences in training lookups of ids with a row; of ids without one.
        DEFAULT_SERVED: occurrences that read the value of ids without a row.
    """

    BUCKET_COUNT = 0
    SIZE = 1
    TOMBSTONES = 2
    INSERTED = 3
    GROWTHS = 4
    ERASED = 5
    EVICTED = 6
    REJECTED = 7
    NOT_ADMITTED = 8
    FOUND = 9
    MISSED = 10
    DEFAULT_SERVED = 11


TABLE_COLUMNS = 16


class Slab(IntEnum):
    """Columns of ``slabs``, int64 [slabs, 8]: allocation of the rows of one dim.

    Attributes:
        NEXT_ROW: the first row that has never had an owner.
        FREE_COUNT: rows of removed ids, listed in ``free_rows``.
        COMMITTED_ROWS: rows for which available memory has been checked.
        ROW_BYTES: of weights, generation and optimizer state; 0: memory is not checked.
        GENERATION: generation of rows that are given out for the first time, less 1.
    """

    NEXT_ROW = 0
    FREE_COUNT = 1
    COMMITTED_ROWS = 2
    ROW_BYTES = 3
    GENERATION = 4


SLAB_COLUMNS = 8


class Slot(IntEnum):
    """Columns of ``slots``, int64 [slots, 4]: the rows that a tiered slab has in memory."""

    OWNER = 0
    ID = 1
    USE = 2
    MARKS = 3


SLOT_COLUMNS = 4


class TierHead(IntEnum):
    """Columns of the first row of ``tier_clock``."""

    EPOCH = 0
    TRAINING = 1
    IN_PLACE = 2
    LOADED = 3
    LOADED_BYTES = 4
    WRITTEN_BYTES = 5


class Tier(IntEnum):
    """Columns of ``tier_clock``, int64 [1 + slabs, 16], in the rows of slabs, from the second."""

    LIMIT = 0
    USED = 1
    CURSOR = 2
    FREE_COUNT = 3
    TOUCHES = 4
    HITS = 5
    MISSES = 6
    PREFETCHED = 7
    EVICTED = 8
    WRITTEN = 9
    MOST_USED = 10
    STALE = 11
    SLOT_BYTES = 12
    WORTH = 13
    TIES = 14
    PORTION = 15


TIER_COLUMNS = 16


class Move(IntEnum):
    """Columns of ``moves``, int64 [moves, 7]: rows that move between slots and a store."""

    SLAB = 0
    LOADS = 1
    SLOT = 2
    HANDLE = 3
    ID = 4
    TABLE = 5
    GENERATION = 6


MOVE_COLUMNS = 7


class LiveTable(IntEnum):
    """Columns of ``tables`` of live tables, int64 [tables, 16], changed by updates."""

    ACTIVE = 0
    SIZE = 8
    CAPACITY = 9
    TOMBSTONES = 10
    INSERTED = 11
    UPDATED = 12
    ERASED = 13
    BATCHES = 14


LIVE_TABLE_COLUMNS = 16

# Column of the first row of ``tables`` of served tables, frozen or live: 1 if threads that hold
# Python's lock may release it during a lookup.
SERVED_UNLOCKS = 15


class LiveSlab(IntEnum):
    """Columns of ``free`` of live tables, int64 [slabs, 4]: rows without an owner."""

    NEXT_ROW = 0
    FREE_HEAD = 1
    FREE_COUNT = 2


LIVE_SLAB_COLUMNS = 4


class RowClock(IntEnum):
    """Columns of ``row_clock``, int64 [tables + 4], after the optimizer step of every table.

    Attributes:
        UPDATES: calls that have updated rows.
        SINCE_STEP: calls since the last end of a step.
        STALE: gradients that were dropped because their id had lost its row.
        NON_FINITE: gradients with NaN or infinity, where ``non_finite`` looks for them.
    """

    UPDATES = 0
    SINCE_STEP = 1
    STALE = 2
    NON_FINITE = 3


ROW_CLOCK_EXTRA = 4
TABLES_REPLACED = -1  # of UPDATES: the tables were replaced by others


class Hyper(IntEnum):
    """Columns of ``hyper``, float64 [tables, 24]; ``hyper_row()`` of an optimizer gives a row."""

    LR = 0
    WEIGHT_DECAY = 1
    EPS = 2
    BETA1 = 3
    BETA2 = 4
    INITIAL_STATE = 5
    MOMENTUM = 6
    NESTEROV = 7
    DECOUPLED = 8
    CLIP_VALUE = 9
    CLIP_NORM = 10
    NON_FINITE = 11
    STOCHASTIC = 12
    L1 = 13
    RIDGE = 14
    GROUP = 15
    TRUST = 16
    BETA = 17
    DOWN_SCALE_BY = 18
    SKIP_IF = 19
    MAXIMIZE = 20
    LR_DECAY = 21
    AR_ALPHA = 22
    MIN_SHRINKAGE = 23


HYPER_COLUMNS = 24
DECAY_BY_ITSELF = 2.0  # of DECOUPLED: the decay is not multiplied by lr


class NonFinite(IntEnum):
    """Treatments of a row with NaN or infinity in its gradient."""

    PROPAGATE = 0
    SKIP = 1
    RAISE = 2


class PolicyColumn(IntEnum):
    """Columns of ``policy``, int64 [policies, 24]: life-cycle policy of a table or feature."""

    TIMESTAMP_WORD = 0
    FREQUENCY_WORD = 1
    CUSTOM_WORD = 2
    EXPIRY_WORD = 3
    EVICTION_WORD = 4
    UPDATES_SCORES = 5
    TTL = 6
    CAPACITY = 7
    ON_FULL = 8
    PROTECTED_STEPS = 9
    ADMISSION = 10
    THRESHOLD = 11
    CHANCE = 12
    COUNTER_TABLE = 13
    SKETCH_BEGIN = 14
    SKETCH_WIDTH = 15
    BUDGET = 16
    ID_BYTES = 17
    RESERVED_IDS = 18
    DECAYED_WORD = 19
    HALF_LIFE = 20
    COMBINED_WORD = 21
    COMBINED_INITIAL = 22
    ADMISSION_HALF_LIFE = 23


POLICY_COLUMNS = 24
# Decayed counts are logarithms to base 2 in fixed point (csrc/core/policy/decay.h).
DECAY_BITS = 30
NEVER_OCCURRED = -(1 << 62)
MOST_HALF_LIVES = (1 << 32) - 1
# Added to the logarithm of an id that waits for admission (csrc/core/policy/waiting.h).
WAITING_BASE = 1024 << DECAY_BITS


class Combine(IntEnum):
    """Ways of combining a custom score with that of an id; see ``csrc/core/policy/combine.h``."""

    NONE = -1
    LAST = 0
    MAX = 1
    SUM = 2
    DECAYED_SUM = 3


class OnFull(IntEnum):
    """Treatments of a new id without room."""

    GROW = 0
    EVICT = 1
    DEFAULT = 2
    ERROR = 3


class Admission(IntEnum):
    """Rules for giving a new id a row."""

    ALL = 0
    FREQUENT = 1
    FREQUENT_SKETCH = 2
    BY_CHANCE = 3
    NONE = 4


SKETCH_ROWS = 4


class Clock(IntEnum):
    """Columns of ``clock``, int64 [tables + 2], before the batch scores of the tables."""

    STEP = 0
    NOW = 1


CLOCK_HEAD = 2


class Evicted(IntEnum):
    """Columns of ``evicted``, int64 [1 + records, 4]; the first row has the number of records."""

    TABLE = 0
    ID = 1
    HANDLE = 2
    SCORE = 3


EVICTED_COLUMNS = 4


class InitKind(IntEnum):
    """Kinds of initializer records."""

    CONSTANT = 0
    UNIFORM = 1
    NORMAL = 2
    TRUNCATED_NORMAL = 3
    VECTOR = 4


INIT_RECORD_COLUMNS = 10


class Pooling(IntEnum):
    """Ways of combining the ids of a bag into one vector."""

    SUM = 0
    MEAN = 1
    NONE = 2


class StringHash(IntEnum):
    """Hashes of byte strings."""

    FARM = 0
    MURMUR3 = 1
    MURMUR64A = 2


class RowFormat(IntEnum):
    """Storage of a slab's rows: floats of a tensor's dtype, or quantized."""

    FLOATS = 0
    INT8 = 1
    INT4 = 2
    FLOAT8 = 3


class StoreStat(IntEnum):
    """Columns of ``store_stats``, int64 [16], counted since the store was opened.

    READS, WRITES, COLLECTED and LIVE_RECORDS are records. BYTES_READ and BYTES_WRITTEN are bytes of
    files. QUEUED and MOST_QUEUED are jobs of the storage thread. WAITED_US is the time that callers
    have waited for it, in microseconds. PINNED_SEGMENTS are segments that snapshots need. IO is an
    ``IoPath``.
    """

    READS = 0
    BYTES_READ = 1
    WRITES = 2
    BYTES_WRITTEN = 3
    COLLECTED = 4
    LIVE_RECORDS = 5
    SEGMENTS = 6
    PINNED_SEGMENTS = 7
    DISK_BYTES = 8
    QUEUED = 9
    MOST_QUEUED = 10
    WAITED_US = 11
    IO = 12


STORE_STAT_COLUMNS = 16
