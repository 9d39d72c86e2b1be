"""Faults for kernels, each of which a checker of the emulator must find.

A mutant is a change of text in a copy of a source. MUTANT in the new text says at run time whether
the kernels have the fault, so one library has them all. ``tests/cuda/test_checked_kernels.py`` runs
them.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from emulator.build import OUTPUT, SOURCES, build


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        what: in words.
        check: "bounds", "races", or "values": results depend on the content of fresh memory.
        file: below ``csrc/cuda``.
        old, new: text; the file has the old one once.
        op: its cases show the fault.
        compiled: sources that have the kernels of a header; () for a source.
        cases: part of the names of the cases to run; "": all cases of the op.
    """

    what: str
    check: str
    file: str
    old: str
    new: str
    op: str
    compiled: tuple[str, ...] = ()
    cases: str = ""

    @property
    def family(self) -> str:
        return self.file.split("/")[0]

    @property
    def sources(self) -> tuple[str, ...]:
        return self.compiled or (self.file,)


INSERT = ("index/insert.cu",)
WRITES_PRODUCTS = "__syncwarp(group.mask());  // lane 0 has written the products"
MUTANTS = (
    Mutant(
        "the last offset names a string, too",
        *("bounds", "features/strings.cu"),
        "if (item.index == strings) return;",
        "if (!MUTANT && item.index == strings) return;",
        "string_hash",
    ),
    Mutant(
        "a value past the end",
        *("bounds", "features/values.cu"),
        "const uint64_t value = values[item.feature][item.index];",
        "const uint64_t value = values[item.feature][item.index + (MUTANT ? items.count : 0)];",
        "mod",
    ),
    Mutant(
        "lanes read products before lane 0 has written them",
        *("races", "gradient/reduce.cu"),
        WRITES_PRODUCTS,
        f"if (!MUTANT) {WRITES_PRODUCTS}",
        "bag_weight_grad",
    ),
    Mutant(
        "the key before the first one",
        *("bounds", "gradient/runs.cu"),
        "flags[i] = keys[i] != missing && (i == 0 ||",
        "flags[i] = keys[i] != missing && ((!MUTANT && i == 0) ||",
        "embedding_backward_",
        cases=" sgd",
    ),
    Mutant(
        "pieces of runs are counted by plain additions",
        *("races", "gradient/runs.cu"),
        "first = static_cast<int>(atomicAdd("
        "reinterpret_cast<unsigned long long*>(head + kRunPieces),",
        "first = static_cast<int>(emulator::add(MUTANT, "
        "reinterpret_cast<unsigned long long*>(head + kRunPieces),",
        "embedding_backward_",
        cases=" sgd",
    ),
    Mutant(
        "entries behind the last one are not cleared",
        *("values", "gradient/reduce.cu"),
        "call.fill(entries, 0, n * 8);",
        "if (!MUTANT) call.fill(entries, 0, n * 8);",
        "reduce_grad",
    ),
    Mutant(
        "warps rank ids before all have counted",
        *("races", "index/plan.cuh"),
        "if (lane == 0) warp_counts[warp] = __popc(flagged);\n  __syncthreads();",
        "if (lane == 0) warp_counts[warp] = __popc(flagged);\n  if (!MUTANT) __syncthreads();",
        *("find_or_insert_", INSERT),
    ),
    Mutant(
        "the next ranking begins before the last one has been read",
        *("races", "index/plan.cuh"),
        "before += warp_counts[w];\n  __syncthreads();",
        "before += warp_counts[w];\n  if (!MUTANT) __syncthreads();",
        *("find_or_insert_", ("index/admission.cu",)),
    ),
    Mutant(
        "prefix sums change what neighbours still read",
        *("races", "index/plan.cuh"),
        ": 0;\n    __syncthreads();\n    partial",
        ": 0;\n    if (!MUTANT) __syncthreads();\n    partial",
        *("find_or_insert_", ("index/insert_plan.cu",)),
    ),
    Mutant(
        "a claim is a plain write",
        *("races", "index/placement.cuh"),
        "atomicMin(reinterpret_cast<long long*>(stored + slot), static_cast<long long>(claim));",
        "emulator::lower(MUTANT, "
        "reinterpret_cast<long long*>(stored + slot), static_cast<long long>(claim));",
        *("find_or_insert_", INSERT),
    ),
    Mutant(
        "a new id has a position past the end",
        *("bounds", "index/insert.cu"),
        "new_positions[rank] = static_cast<int32_t>(i);",
        "new_positions[rank + (MUTANT ? features.count : 0)] = static_cast<int32_t>(i);",
        "find_or_insert_",
    ),
    Mutant(
        "shared memory is not initialized",
        *("values", "index/insert_plan.cu"),
        "refused = plan.head[kPlanInvalid] != 0 ? 1 : 0;",
        "if (!MUTANT) refused = plan.head[kPlanInvalid] != 0 ? 1 : 0;",
        "find_or_insert_",
    ),
    Mutant(
        "threads read a word before thread 0 has initialized it",
        *("races", "index/insert_plan.cu"),
        "__syncthreads();\n  const FeatureArgs& features = job.features;",
        "if (!MUTANT) __syncthreads();\n  const FeatureArgs& features = job.features;",
        "find_or_insert_",
    ),
    Mutant(
        "lane 0 changes a row's state that other lanes still read",
        *("races", "optimizer/row_update.cuh"),
        "__syncwarp(group.mask());  // all lanes have read",
        "if (!MUTANT) __syncwarp(group.mask());  // all lanes have read",
        *("embedding_backward_", ("optimizer/part_2.cu",), " rowwise_adagrad"),
    ),
    Mutant(
        "one entry more than there are",
        *("bounds", "optimizer/update.cu"),
        "for (int64_t t = threadIdx.x; t < table_count; t += blockDim.x) {",
        "for (int64_t t = threadIdx.x; t < table_count + MUTANT; t += blockDim.x) {",
        "embedding_backward_",
        cases=" sgd",
    ),
    Mutant(
        "one slot more than tiles have",
        *("bounds", "ragged/tile.cu"),
        "store_floats<kWidth>(to + column, value);",
        "store_floats<kWidth>(to + column + (MUTANT ? slots.count * args.dim : 0), value);",
        "ragged_tile",
    ),
    Mutant(
        "one query more than there are",
        *("bounds", "retrieval/merge_top_k.cu"),
        "if (query >= given.queries) return;",
        "if (query >= given.queries + MUTANT) return;",
        "merge_top_k",
    ),
    Mutant(
        "samples that need a rank are counted by plain additions",
        *("races", "retrieval/sample_ids.cu"),
        "atomicAdd(reinterpret_cast<unsigned long long*>(args.ranks_drawn), 1ULL);",
        "emulator::add(MUTANT, reinterpret_cast<unsigned long long*>(args.ranks_drawn), 1ULL);",
        "sample_ids",
    ),
    Mutant(
        "live ids are not counted from zero",
        *("values", "retrieval/sample_ids.cu"),
        "call.fill(scratch.get(counts), 0, (1 + kSegments) * 8);",
        "if (!MUTANT) call.fill(scratch.get(counts), 0, (1 + kSegments) * 8);",
        "sample_ids",
    ),
    Mutant(
        "one id more than there are",
        *("bounds", "routing/ids_partition.cu"),
        "if (to >= job.count) return;",
        "if (to >= job.count + MUTANT) return;",
        "ids_partition",
    ),
    Mutant(
        "counts of ids are plain additions",
        *("races", "routing/unique.cu"),
        "atomicAdd(reinterpret_cast<unsigned long long*>(job.results.counts + number), 1ULL);",
        "emulator::add(MUTANT, "
        "reinterpret_cast<unsigned long long*>(job.results.counts + number), 1ULL);",
        "unique_ids",
    ),
    Mutant(
        "counts of ids do not begin at zero",
        *("values", "routing/unique.cu"),
        "call.fill(results.counts, 0, given.count * 8);",
        "if (!MUTANT) call.fill(results.counts, 0, given.count * 8);",
        "unique_ids",
    ),
    Mutant(
        "lanes read products before lane 0 has written them",
        *("races", "rows/pool_rows.cu"),
        WRITES_PRODUCTS,
        f"if (!MUTANT) {WRITES_PRODUCTS}",
        "pool_rows_weight_grad",
    ),
    Mutant(
        "one id more than there are",
        *("bounds", "rows/lookup.cu"),
        "if (own < features.count) {",
        "if (own < features.count + MUTANT) {",
        "embedding",
        cases="rows",
    ),
    Mutant(
        "threads read a key before it is written",
        *("races", "runtime/device.cuh"),
        "if (threadIdx.x == 0) first_key = key;\n  __syncthreads();",
        "if (threadIdx.x == 0) first_key = key;\n  if (!MUTANT) __syncthreads();",
        *("find_or_insert_", INSERT),
    ),
    Mutant(
        "counters are plain additions",
        *("races", "runtime/device.cuh"),
        "    atomicAdd(counter, 1ULL);",
        "    emulator::add(MUTANT, counter, 1ULL);",
        *("find", ("index/find.cu",)),
    ),
    Mutant(
        "one word more than there are",
        *("bounds", "runtime/launch.cu"),
        "for (int64_t i = threadIdx.x; i < count; i += blockDim.x) to[i] = words.value[i];",
        "for (int64_t i = threadIdx.x; i < count + MUTANT; i += blockDim.x) "
        "to[i] = words.value[i];",
        "embedding",
        cases="rows",
    ),
    Mutant(
        "worths of slots are counted by plain additions",
        *("races", "storage/victims.cu"),
        "atomicAdd(counts + slot_worth(words[kSlotUse], now), 1U);",
        "emulator::add(MUTANT, counts + slot_worth(words[kSlotUse], now), 1U);",
        "stage_",
    ),
    Mutant(
        "one id more than there are",
        *("bounds", "storage/stage.cu"),
        "if (i > job.features.count) return;",
        "if (i > job.features.count + MUTANT) return;",
        "stage_",
    ),
)


def mutated_sources(check: str) -> tuple[list[Path], Path]:
    """Copies of the sources with the mutants of a check.

    Returns:
        The sources to compile instead of those of the same names below ``csrc``, and the folder
        that is to be included before ``csrc``.

    Raises:
        ValueError: a file does not have a mutant's text exactly once.
    """
    folder = OUTPUT.with_name(f"{OUTPUT.name}_{check}_mutants")
    texts: dict[str, str] = {}
    sources: set[str] = set()
    for number, mutant in enumerate(MUTANTS, 1):
        if (mutant.check == "races") != (check == "races"):
            continue
        text = texts.get(mutant.file) or (SOURCES / "cuda" / mutant.file).read_text()
        if text.count(mutant.old) != 1:
            raise ValueError(
                f"{mutant.file} has {text.count(mutant.old)} times the text of mutant {number}: "
                f"{mutant.old!r}. Adapt tests/emulator/mutants.py."
            )
        new = mutant.new.replace("MUTANT", f"(emulator::mutant == {number})")
        texts[mutant.file] = text.replace(mutant.old, new)
        sources.update(mutant.sources)
    for name, text in texts.items():
        copy = folder / "csrc" / "cuda" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.is_file() or copy.read_text() != text:
            copy.write_text(text)
    for name in sources - texts.keys():
        copy = folder / "csrc" / "cuda" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(SOURCES / "cuda" / name, copy)
    return [folder / "csrc" / "cuda" / name for name in sorted(sources)], folder / "csrc"


def build_mutants(check: str) -> Path:
    """Builds the library of a check with mutants; ``emulator_set_mutant`` chooses one.

    Returns:
        Its path.
    """
    replaced, include = mutated_sources(check)
    return build(check, name="dynemb_emulated_mutants", replaced=replaced, include=include)
