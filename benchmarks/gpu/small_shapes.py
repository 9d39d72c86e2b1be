"""Program that runs every op on a GPU with small shapes, and compares results with the CPU's.

It is short enough for a sanitizer. Shapes pass through every kernel: rows of odd and even width,
bags of mixed length, and new, repeated, erased and padding ids. The index grows, and runs are long
enough to be cut into pieces.
"""

from __future__ import annotations

import argparse
import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_dynemb as td
from benchmarks.gpu.value_calls import Calls, ValueCalls
from torch_dynemb import ops
from torch_dynemb._library.op_names import op_names, op_tags, tagged_ops, takes_tensors
from torch_dynemb.ops.columns import Pooling, RowClock
from torch_dynemb.ops.pending import PendingGradients, merge_grad_
from torch_dynemb.storage.cuda import CudaMemory
from torch_dynemb.table import group as table_group


def _is_config(kind: object) -> bool:
    return isinstance(kind, type) and "kernel_name" in vars(kind)


OPTIMIZERS: dict[str, td.optim.OptimizerConfig] = {
    **{kind.kernel_name: kind(lr=0.1) for kind in vars(td.optim).values() if _is_config(kind)},
    # with options that kernels branch on
    "adagrad": td.Adagrad(lr=0.1, initial_accumulator_value=0.5),
    "rowwise_adagrad": td.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.5),
    "momentum_sgd": td.MomentumSGD(lr=0.1, nesterov=True),
    "partial_rowwise_adam": td.PartialRowWiseAdam(lr=0.1, row_steps=True),
    "rmsprop_momentum": td.RMSprop(lr=0.1, momentum=0.5),
    "rowwise_rmsprop": td.RowWiseRMSprop(lr=0.1, ar_alpha=1.0),
    "lamb": td.LAMB(lr=0.1, weight_decay=0.1),
    "partial_rowwise_lamb": td.PartialRowWiseLAMB(lr=0.1, weight_decay=0.1),
    "ftrl": td.Ftrl(lr=0.1, l1=0.01),
    "group_ftrl": td.GroupFtrl(lr=0.1, group_l1=0.01),
}
LONG_RUN = 3000  # occurrences of one id
FIRST_PART = "insertion"  # gives the tables the ids of the parts after it


class PlainMemory(CudaMemory):
    """Memory of a GPU in allocations of their own, where a sanitizer sees accesses beyond them.

    Mapped memory comes in pages of 2 MiB.
    """

    def reserve(self, size: Sequence[int], dtype: torch.dtype, *, huge_pages: bool) -> Tensor:
        return torch.zeros(list(size), dtype=dtype, device=self.device)

    def bind(self, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def plain_memory() -> Iterator[None]:
    """Give tables of a GPU, made within, plain tensors."""
    with patch.object(table_group, "memory_of", lambda owner, device: PlainMemory(device)):
        yield


class Recorder(TorchDispatchMode):
    """Recorder of the ops that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dynemb":
            self.names.add(func._schema.name.removeprefix("dynemb::"))
        return func(*args, **(kwargs or {}))


# of tables beneath a cache: a HostStore, which the CPU takes as memory
CACHED_OPS = ("stage_", "staged_lookup_", "prefetch_")


def wanted_ops(device: torch.device) -> set[str]:
    """Return the ops that have work for a device: not those of host memory and files."""
    on_gpu = device.type == "cuda"
    unwanted = tagged_ops("host", "store") if on_gpu else {*op_tags(), *CACHED_OPS}
    return {name for name in op_names() if name not in unwanted and takes_tensors(name)}


class TableCalls(Calls):
    """Program of the ops that have a table, with one optimizer, a key of OPTIMIZERS."""

    part_names = (
        FIRST_PART,
        "pooled",
        "sequence",
        "quantized",
        "split_update",
        "export",
        "retrieval",
        "policies",
        "cached",
        "split_mode",
    )

    def __init__(self, device: torch.device, optimizer: str, results: dict[str, Tensor]) -> None:
        super().__init__(device, optimizer, results)
        self.optimizer = optimizer
        policy = td.Policy(score="step")
        tables = [
            td.TableConfig("a", 8, policy=policy),
            td.TableConfig("b", 3, padding_idx=0, policy=policy),
            td.TableConfig("c", 8, initializer=td.Uniform(), policy=policy),
        ]
        self.group = td.TableGroup(
            tables,
            optimizer=OPTIMIZERS[optimizer],
            max_rows=20_000,
            seed=2,
            device=device,
        )

    def pooled_call(self) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Return ids, offsets, tables and dims of three features of four bags each."""
        bags: list[list[int]] = [[1, 2, 700], [], [5], [2] * LONG_RUN]
        bags += [[0, 3, 3, 701], [702], [4], []]
        bags += [[6], [703, 7, 7], [], list(range(40))]
        lengths = [0, *(len(bag) for bag in bags)]
        ids = self.tensor([id for bag in bags for id in bag])
        return ids, self.tensor(lengths).cumsum(0), [0, 1, 2], [8, 3, 8]

    def _insertion(self) -> None:
        group = self.group
        for table in range(3):
            group.index.clock[0] += 1
            group.insert(table, torch.arange(500, device=self.device))
        group.erase(0, torch.arange(3, device=self.device))
        self.keep("insert after erase", group.insert(0, self.tensor([900, 1, 901, 901, 2])))
        scored = self.tensor([900, 1, 7])
        group.scores.set(0, scored, self.tensor([70, 1, 8]))
        self.keep("scores", *group.scores.get(0, self.tensor([1, 2, 900, 12345])))
        group.reserve(2, 3000)
        worth = td.Policy(score=td.Custom(combine="decayed_sum", half_life_steps=5))
        weighed = td.TableGroup(
            [td.TableConfig("weighed", 4, policy=worth)],
            optimizer=OPTIMIZERS[self.optimizer],
            max_rows=1000,
            device=self.device,
        )
        ids = torch.arange(300, device=self.device) % 70
        weighed.insert(0, ids, scores=(ids + 1).double() / 3)
        self.keep("decayed sums", weighed.scores.get(0, ids).scores)

    def _cached(self) -> None:
        """Train a table with fewer rows in the cache than a step looks up."""
        module = td.DynamicEmbedding(
            8,
            name="cached",
            optimizer=OPTIMIZERS[self.optimizer],
            storage=td.HostStore(cache="64 rows"),
            max_rows=5000,
            device=self.device,
        )
        for step in range(4):
            ids = (torch.arange(200, device=self.device) * 7) % (90 + 40 * step)
            module.prefetch(ids)
            module(ids).square().sum().backward()
            module.optimizer.step()
        ids = torch.arange(250, device=self.device)
        self.keep("cached rows", module.eval()(ids), module.group.read(0, ids))

    def _retrieval(self) -> None:
        """Sample a full and a nearly empty table, and search one."""
        group = self.group
        seed = self.tensor([5])
        for table in range(3):
            self.keep(
                f"sample_ids {table}",
                ops.sample_ids(group.index, seed, table=table, samples=3000),
            )
        best = ops.BestScores(
            torch.full((4, 6), -torch.inf, device=self.device),
            torch.full((4, 6), -1, device=self.device),
        )
        for batch in group.export(1, batch_size=256):
            scores = (batch.ids % 7)[None].float() * self.tensor([[1], [-1], [0], [2]])
            best = ops.merge_top_k(scores, batch.ids, best)
        self.keep("merge_top_k", *best)

    def _export(self) -> None:
        group = self.group
        self.keep("materialize_", torch.tensor(group.materialize()))
        for table in range(3):
            for number, batch in enumerate(group.export(table, batch_size=256)):
                self.keep(f"export {table} {number}", *batch)
        group.step()
        self.keep(
            "tables", group.index.tables, group.index.slabs, group.rows.row_clock, group.index.clock
        )
        group.end_step()

    def _policies(self) -> None:
        """Run counted and full tables: admission, eviction, refusal, compaction."""
        rules: list[td.admission.AdmissionRule | None] = [
            None,
            td.AdmitFrequent(2),
            td.AdmitFrequentSketch(2, 4096),
            td.AdmitByChance(0.5),
        ]
        tables = [
            td.TableConfig(
                f"t{number}",
                8,
                policy=td.Policy(score=("frequency", "timestamp"), capacity=300, admission=rule),
            )
            for number, rule in enumerate(rules)
        ]
        optimizer = OPTIMIZERS[self.optimizer]
        group = td.TableGroup(tables, optimizer=optimizer, seed=2, device=self.device)
        group.clock.set_now(0)
        group.evicted.record(2000)
        features = [0, 1, 2, 3]
        for step in range(6):
            ids = torch.arange(1000, device=self.device) * (step + 1) % 1400
            offsets = self.tensor([0, 250, 500, 750, 1000])
            self.keep(f"policies {step}", group.find_or_insert(ids, offsets, features))
            group.step(now=step)
        for table in features:
            group.remove(table, predicate=lambda ids, _: ids % 3 == 0)
        group.compact()
        for table in features:
            for number, batch in enumerate(group.export(table)):
                self.keep(f"compacted {table} {number}", *batch)
        self.keep(
            "policies",
            group.index.evicted,
            group.index.sketch,
            group.index.tables,
            group.index.slabs,
        )
        group.end_step()
        self.keep("reported", torch.tensor(group.usage.tables(wait=True)["t0"].evicted))
        group.usage.tables()

    def _split_mode(self) -> None:
        """Run rows and state below float32, and gradients that wait, NaN among them."""
        config = OPTIMIZERS[self.optimizer]
        config = replace(config, clip_norm=10.0, non_finite="skip", stochastic_rounding=False)
        if isinstance(config, td.Adam):
            config = replace(config, state_dtype=torch.uint8)
        tables = [
            td.TableConfig("a", 8, dtype=torch.bfloat16),
            td.TableConfig("b", 135, dtype=torch.float16),
            td.TableConfig("c", 8),
        ]
        group = td.TableGroup(
            tables, optimizer=config, max_rows=2000, seed=2, device=self.device, split=True
        )
        pending = PendingGradients.of(group.rows.pending)
        ids, offsets, features, _ = self.pooled_call()
        dims = [8, 135, 8]
        for _ in range(2):
            handles = group.find_or_insert(ids, offsets, features)
            output = ops.embedding(
                group.rows,
                ops.LookupBatch(ids, offsets, None, features, dims, Pooling.MEAN),
                handles,
                torch.zeros(1, device=self.device, requires_grad=True),
                optimizer=group.config.optimizer_code,
            )
            gradient = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
            gradient[2, 9] = float("nan")
            output.backward(gradient.to(self.device))
        merge_grad_(pending, group.rows)
        self.keep("merged", pending.counts, group.rows.row_clock)
        for slab, count in enumerate(pending.counts[:, 0].tolist()):
            self.keep(f"merged {slab}", pending.handles[slab][:count])
            self.keep(f"sums {slab}", pending.gradients[slab][:count].nan_to_num())
        updates = group.rows.row_clock[len(tables) + RowClock.UPDATES].reshape(1).clone()
        counts = pending.counts[:, 0].contiguous()
        number = OPTIMIZERS[self.optimizer].kernel_number
        given = (*pending[:-1], counts, updates, features, number)
        torch.ops.dynemb.apply_grad_(*group.rows.updated, *given)
        pending.counts.zero_()
        group.end_step()
        self.keep("split", group.rows.row_clock)

    def _pooled(self) -> None:
        group = self.group
        ids, offsets, tables, dims = self.pooled_call()
        count = ids.numel()
        for pooling in (Pooling.SUM, Pooling.MEAN):
            for weighted in (False, True):
                weights = None
                if weighted:
                    weights = torch.linspace(0.5, 1.5, count).to(self.device).requires_grad_()
                found = group.find(ids, offsets, tables)
                handles = group.find_or_insert(ids, offsets, tables)
                self.keep(f"find {pooling} {weighted}", *found, handles)
                batch = ops.LookupBatch(ids, offsets, weights, tables, dims, pooling)
                read = ops.embedding_inference(group.rows, batch, handles)
                anchor = torch.zeros(1, device=self.device, requires_grad=True)
                code = group.config.optimizer_code
                output = ops.embedding(group.rows, batch, handles, anchor, optimizer=code)
                gradient = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
                output.backward(gradient.to(self.device))
                self.keep(f"bags {pooling} {weighted}", read, output)
                if weights is not None and weights.grad is not None:
                    self.keep(f"weights {pooling}", weights.grad)

    def _sequence(self) -> None:
        group = self.group
        ids = self.tensor([1, 2, 800, 2, 5, 6, 6, 801])
        offsets, tables = self.tensor([0, 4, 8]), [0, 2]
        handles = group.find_or_insert(ids, offsets, tables)
        batch = ops.LookupBatch.of_rows(ids, offsets, tables, 8)
        read = ops.embedding_inference(group.rows, batch, handles)
        anchor = torch.zeros(1, device=self.device, requires_grad=True)
        code = group.config.optimizer_code
        output = ops.embedding(group.rows, batch, handles, anchor, optimizer=code)
        output.backward(torch.linspace(-1, 1, 64).reshape(8, 8).to(self.device))
        rows = group.rows
        # ops of compiled code, and modules with ops that only autograd sees
        forward = torch.ops.dynemb.embedding_forward(
            rows.weights,
            rows.generations,
            rows.row_clock,
            rows.meta,
            rows.init_data,
            ids,
            handles,
            offsets,
            None,
            tables,
            [8, 8],
            int(Pooling.NONE),
        )
        self.keep("sequence", read, output, *forward)

    def _quantized(self) -> None:
        """Run rows as they are, and quantized, of 8 columns and of 3."""
        group = self.group
        ids, offsets, tables, dims = self.pooled_call()
        handles = group.find(ids, offsets, tables).handles
        used = [group.index.used_rows(slab) for slab in range(2)]  # no more has memory
        weights = [slab[:rows] for slab, rows in zip(group.rows.weights, used, strict=True)]
        generations = [slab[:rows] for slab, rows in zip(group.rows.generations, used, strict=True)]
        for formats in ([3, 1], [1, 2], [0, 3]):  # of the slabs of 3 and of 8 columns
            packed = [
                slab if form == 0 else ops.quantize_rows(slab, form)
                for slab, form in zip(weights, formats, strict=True)
            ]
            rows = group.rows._replace(weights=packed, generations=generations)
            for pooling in (Pooling.SUM, Pooling.MEAN):
                factors = torch.linspace(0.5, 1.5, len(ids), device=self.device)
                batch = ops.LookupBatch(ids, offsets, factors, tables, dims, pooling)
                read = ops.embedding_inference(rows, batch, handles, formats=formats)
                self.keep(f"quantized bags {formats} {pooling}", read)
            known, at = handles[:4].contiguous(), self.tensor([0, 4])
            batch = ops.LookupBatch.of_rows(ids[:4], at, [0], 8)
            row = ops.embedding_inference(rows, batch, known, formats=formats)
            self.keep(f"quantized sequence {formats}", row)
        for form in (1, 2, 3):
            plain = torch.linspace(-3, 5, 20 * 40, device=self.device).reshape(20, 40).square()
            codes = ops.quantize_rows(plain, form)
            self.keep(f"codes {form}", codes, ops.dequantize_rows(codes, form, 40))

    def _split_update(self) -> None:
        group = self.group
        ids, offsets, tables, dims = self.pooled_call()
        handles = group.find(ids, offsets, tables).handles
        columns = sum(dims)
        gradient = torch.linspace(-1, 1, 4 * columns).reshape(4, columns).to(self.device)
        batch = ops.LookupBatch(ids, offsets, None, tables, dims, Pooling.SUM)
        reduced = ops.reduce_grad(group.rows, gradient, batch, handles)
        self.keep("reduce_grad", *reduced.handles, *reduced.gradients, reduced.counts)
        position = len(group.config.tables) + RowClock.UPDATES
        updates = group.rows.row_clock[position : position + 1].clone()
        number = OPTIMIZERS[self.optimizer].kernel_number
        torch.ops.dynemb.apply_grad_(*group.rows.updated, *reduced, updates, tables, number)


@dataclass(frozen=True)
class Run:
    """Results of a program on a device.

    Attributes:
        results: by optimizer and name.
        ops: names of the ops that ran.
        failures: what raised an error.
    """

    results: dict[str, Tensor]
    ops: set[str]
    failures: list[str]


def parts_of(
    device: torch.device, optimizer: str, results: dict[str, Tensor]
) -> dict[str, Callable[[], None]]:
    """Make the tables of a program; return its parts by name."""
    of_tables = TableCalls(device, optimizer, results).parts()
    return of_tables | ValueCalls(device, optimizer, results).parts()


def finish(device: torch.device, part: Callable[[], None]) -> None:
    """Run a part, wait for the device, and raise what its kernels reported."""
    part()
    if device.type == "cuda":
        torch.cuda.synchronize()
        ops.raise_device_errors(torch.cuda.current_device())


def run(device: torch.device, optimizers: list[str], names: Sequence[str] = ()) -> Run:
    """Run the program for some optimizers; an error ends one part of it, and the others go on.

    Args:
        names: parts to run; none: all.
    """
    done = Run({}, set(), [])
    for optimizer in optimizers:
        with Recorder() as recorder:
            for name, part in parts_of(device, optimizer, done.results).items():
                if names and name not in names:
                    continue
                try:
                    finish(device, part)
                except Exception as error:
                    traceback.print_exc()
                    done.failures.append(f"{optimizer}: {name}: {type(error).__name__}: {error}")
        done.ops.update(recorder.names)
        print(f"{device}: {optimizer}", flush=True)
    return done


def differences(expected: dict[str, Tensor], given: dict[str, Tensor]) -> list[str]:
    """Return results that differ; floats may differ by the rounding of a sum over a row."""
    names = sorted(expected.keys() ^ given.keys())
    for name in sorted(expected.keys() & given.keys()):
        a, b = expected[name], given[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            names.append(name)
        elif a.dtype.is_floating_point:
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-5):
                names.append(name)
        elif not torch.equal(a, b):
            names.append(name)
    return names


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a check")
    arguments.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS)
    )
    arguments.add_argument("--parts", nargs="+", default=[], help="names of parts; default: all")
    arguments.add_argument(
        "--plain", action="store_true", help="tensors of their own size, not in mapped pages"
    )
    options = arguments.parse_args()
    device = torch.device(options.device)
    with plain_memory() if options.plain else contextlib.nullcontext():
        given = run(device, options.optimizers, options.parts)
    expected = run(torch.device("cpu"), options.optimizers, options.parts)
    if given.failures:
        print("\n".join(given.failures))
        raise SystemExit(f"{len(given.failures)} parts failed: {given.failures[0][:200]}")
    if wrong := differences(expected.results, given.results):
        raise SystemExit(f"{len(wrong)} results differ from the CPU's: {', '.join(wrong[:20])}")
    wanted = set() if options.parts else wanted_ops(device)
    if not_run := sorted(wanted - given.ops):
        raise SystemExit(f"ops that were not run: {', '.join(not_run)}")
    print(f"{len(given.ops)} ops ran on {device}, {len(given.results)} results equal the CPU's")


if __name__ == "__main__":
    main()
