"""A module of your own on `torch.ops.dynemb`, with plain tensors; trained, compiled, exported.

The modules of the package hold their tables in a `TableGroup`, which grows, saves and shards them.
Another module, or another framework's layer, needs none of it: ops take plain tensors.
`IndexTensors` and `RowTensors` (torch_dynemb/ops/tensors.py) say which, and this program makes them
with `torch.zeros`, as buffers of an ordinary `nn.Module` with room for a fixed number of ids.
torch_dynemb/ops/README.md lists the ops and how they are called, and has a module with two slabs;
`help(torch_dynemb.ops.find)` documents `torch.ops.dynemb.find`, and so on.

The task is a small one: every id has a hidden number, and the model has to learn it.

Example:
    python -m tutorials.raw_ops --steps 200
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.initializers import InitData
from torch_dynemb.ops import IndexTensors, RowTensors
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    BUCKET_WORDS,
    CLOCK_HEAD,
    EVICTED_COLUMNS,
    META_COLUMNS,
    MIN_BUCKETS,
    POLICY_COLUMNS,
    ROW_CLOCK_EXTRA,
    SLAB_COLUMNS,
    TABLE_COLUMNS,
    Meta,
    Table,
    buckets_for,
)

# One feature, which reads table 0; an op may read any number of them.
FEATURE_TABLES = [0]
SUM = 0


class HashedSum(nn.Module):
    """Module of sums of rows: bags of ids, float32 [bags, dim]. New ids are hashed and get a row.

    Args:
        ids: room for so many.
        dim: columns of a row.
        optimizer: updates the rows in the backward.
        seed: of the initial values.
    """

    def __init__(self, ids: int, dim: int, optimizer: td.Adam, seed: int = 0) -> None:
        super().__init__()
        self.dim = dim
        self.optimizer = optimizer.kernel_number
        self.grad_anchor = nn.Parameter(torch.zeros(1))  # autograd runs the backward because of it
        index, rows = _empty_table(ids, dim, optimizer, seed)
        # A buffer for each tensor, so that state_dict() saves the whole table. The names are those
        # of the records, with a prefix, because exported programs have a "meta" of their own.
        for name, tensor in index._asdict().items():
            self.register_buffer(f"index_{name}", tensor)
        for name in ("row_clock", "hyper", "init_data"):
            self.register_buffer(name, getattr(rows, name))
        self.register_buffer("weights", rows.weights[0])
        self.register_buffer("generations", rows.generations[0])
        self.states = len(rows.state)
        for number, tensor in enumerate(rows.state):
            self.register_buffer(f"state_{number}", tensor)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Look ids up.

        Args:
            ids: int64 [N], any values.
            offsets: int64 [bags + 1], where bags begin in ``ids``, and N.
        """
        index, rows = self.index(), self.rows()
        if not self.training:  # reads only: an id without a row gives its initial value
            handles, _ = torch.ops.dynemb.find(
                index.buckets, index.tables, index.meta, ids, offsets, FEATURE_TABLES
            )
            return torch.ops.dynemb.embedding_inference(
                *rows.read, ids, handles, offsets, None, FEATURE_TABLES, [self.dim], SUM
            )
        handles = torch.ops.dynemb.find_or_insert_(*index, ids, offsets, None, FEATURE_TABLES, [])
        output, _ = torch.ops.dynemb.embedding(
            *rows, ids, handles, offsets, None, self.grad_anchor, FEATURE_TABLES, [self.dim], SUM,
            self.optimizer,
        )  # fmt: skip
        return output

    def index(self) -> IndexTensors:
        """Return which ids there are: what lookups change."""
        return IndexTensors(*(getattr(self, f"index_{name}") for name in IndexTensors._fields))

    def rows(self) -> RowTensors:
        """Return the rows of ids: what the backward changes."""
        return RowTensors(
            weights=[self.weights],
            generations=[self.generations],
            state=[getattr(self, f"state_{number}") for number in range(self.states)],
            dirty_bits=[],
            copy_on_write=[],
            row_clock=self.row_clock,
            hyper=self.hyper,
            meta=self.index_meta,
            init_data=self.init_data,
            pending=[],  # nothing: the backward updates the rows at once
        )

    def end_step(self) -> None:
        """End a training step: the optimizer's bias correction counts steps."""
        index = self.index()
        torch.ops.dynemb.end_step_(index.buckets, index.tables, self.row_clock, index.clock, None)

    def __len__(self) -> int:
        return int(self.index().tables[0, Table.SIZE])


def _empty_table(
    ids: int, dim: int, optimizer: td.Adam, seed: int
) -> tuple[IndexTensors, RowTensors]:
    """Return the tensors of one table without ids."""
    buckets = buckets_for(ids)  # the index begins with few, and grows in a region of so many

    def words(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64)

    init = InitData()
    meta = words(1, META_COLUMNS)
    meta[0, Meta.SEED] = seed
    meta[0, Meta.DIM] = dim
    meta[0, Meta.REGION_BUCKETS] = buckets
    initial = init.add(td.Normal(std=0.01), dim)
    meta[0, Meta.INIT_BEGIN], meta[0, Meta.INIT_COUNT] = initial
    meta[0, Meta.DEFAULT_BEGIN], meta[0, Meta.DEFAULT_COUNT] = initial  # of ids without a row
    meta[0, Meta.REFUSED_BEGIN], meta[0, Meta.REFUSED_COUNT] = initial
    tables = words(1, TABLE_COLUMNS)
    tables[0, Table.BUCKET_COUNT] = MIN_BUCKETS
    index = IndexTensors(
        buckets=words(buckets, BUCKET_WORDS),
        scores=words(0, BUCKET_WIDTH),  # no scores are kept: no id is evicted
        tables=tables,
        slabs=words(1, SLAB_COLUMNS),
        free_rows=words(1, ids),
        sketch=torch.zeros(0, dtype=torch.int32),
        evicted=words(1, EVICTED_COLUMNS),
        meta=meta,
        policy=words(0, POLICY_COLUMNS),
        clock=words(CLOCK_HEAD + 1),
    )
    rows = RowTensors(
        weights=[torch.zeros(ids, dim)],
        generations=[torch.zeros(ids, dtype=torch.int32)],
        state=[
            torch.zeros((ids,) if each.per_row else (ids, each.columns(dim)), dtype=each.dtype)
            for each in optimizer.state
        ],
        dirty_bits=[],  # no reader of changes
        copy_on_write=[],  # no save in a thread
        row_clock=words(1 + ROW_CLOCK_EXTRA),
        hyper=torch.tensor([optimizer.hyper_row()], dtype=torch.float64),
        meta=meta,
        init_data=init.tensor(),
        pending=[],
    )
    return index, rows


def batches(steps: int, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return bags of three ids, where they begin, and the sums of the ids' hidden numbers."""
    generator = torch.Generator().manual_seed(seed)
    spread = 2_654_435_761  # ids are far apart: no vocabulary would hold them
    made = []
    for _ in range(steps):
        numbers = torch.randint(0, 500, (64, 3), generator=generator)
        target = torch.sin(numbers.double()).sum(1, keepdim=True).float()
        made.append((numbers.flatten() * spread, torch.arange(0, 64 * 3 + 1, 3), target))
    return made


def train(model: HashedSum, step_of: nn.Module, steps: int) -> float:
    """Train; returns the mean squared error of the last ten steps."""
    losses = []
    for ids, offsets, target in batches(steps, seed=0):
        loss = (step_of(ids, offsets).sum(1, keepdim=True) - target).square().mean()
        loss.backward()  # also updates the rows of these ids
        model.end_step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    options = parser.parse_args()
    if options.steps < 10:
        parser.error(f"--steps is {options.steps}: the loss is a mean of the last 10 steps")

    model = HashedSum(ids=10_000, dim=8, optimizer=td.Adam(lr=0.03))
    print(f"eager: loss {train(model, model, options.steps):.4f}, {len(model)} ids")

    compiled = HashedSum(ids=10_000, dim=8, optimizer=td.Adam(lr=0.03))
    whole = torch.compile(compiled, fullgraph=True)
    print(f"compiled: loss {train(compiled, whole, options.steps):.4f}, {len(compiled)} ids")
    print("the same bits:", torch.equal(model.weights, compiled.weights))

    copy = HashedSum(ids=10_000, dim=8, optimizer=td.Adam(lr=0.03))
    copy.load_state_dict(model.state_dict())  # the table is its buffers

    ids, offsets, _ = batches(1, seed=1)[0]
    any_number = {
        "ids": {0: torch.export.Dim("ids", min=2)},
        "offsets": {0: torch.export.Dim("bags_and_1", min=3)},
    }
    program = torch.export.export(copy.eval(), (ids, offsets), dynamic_shapes=any_number)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.pt2"
        torch.export.save(program, file)
        loaded = torch.export.load(file).module()
        print("exported, loaded:", torch.equal(loaded(ids, offsets), model.eval()(ids, offsets)))


if __name__ == "__main__":
    main()
