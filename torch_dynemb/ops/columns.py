"""Columns of the descriptor tensors; the C++ side has them in ``csrc/core/columns.h``."""

from __future__ import annotations

from enum import IntEnum

BUCKET_WIDTH = 4
BUCKET_WORDS = 2 * BUCKET_WIDTH
MAX_LOAD_PERCENT = 70
GENERATION_BITS = 28
MAX_ROWS = (1 << 35) - 1
NO_HANDLE = -1
PADDING_HANDLE = -2


class Meta(IntEnum):
    """Columns of ``meta``, int64 [tables, 16]: constants of a table."""

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


META_COLUMNS = 16


class Table(IntEnum):
    """Columns of ``tables``, int64 [tables, 8]: the index state of a table."""

    BUCKET_COUNT = 0
    SIZE = 1
    TOMBSTONES = 2
    INSERTED = 3
    GROWTHS = 4
    ERASED = 5


TABLE_COLUMNS = 8


class Slab(IntEnum):
    """Columns of ``slabs``, int64 [slabs, 4]: allocation of the rows of one dim."""

    NEXT_ROW = 0
    FREE_COUNT = 1
    COMMITTED_ROWS = 2
    ROW_BYTES = 3


SLAB_COLUMNS = 4


class RowClock(IntEnum):
    """Columns of ``row_clock``, int64 [tables + 4], after the optimizer step of every table."""

    UPDATES = 0
    SINCE_STEP = 1
    STALE = 2


ROW_CLOCK_EXTRA = 4


class Hyper(IntEnum):
    """Columns of ``hyper``, float64 [tables, 8]."""

    LR = 0
    WEIGHT_DECAY = 1
    EPS = 2
    BETA1 = 3
    BETA2 = 4
    INITIAL_STATE = 5


HYPER_COLUMNS = 8


class InitKind(IntEnum):
    """What an initializer record does with its columns."""

    CONSTANT = 0
    UNIFORM = 1
    NORMAL = 2
    TRUNCATED_NORMAL = 3
    VECTOR = 4


INIT_RECORD_COLUMNS = 10


class Pooling(IntEnum):
    """How the ids of a bag become one vector."""

    SUM = 0
    MEAN = 1
    NONE = 2
