"""Tables of the README: which figures they show, and what stands above them."""

from __future__ import annotations

from typing import Any

from .serving_topics import SERVING
from .tables import Cell, Line, Table

DRAWS = ("uniform", "Zipf")
THREADS = ("1 thread", "2 threads")


def _each(bench: str, case: str, names: tuple[object, ...], peer: str, **more: Any) -> Cell:
    """Return a cell with a figure for each name, which stands in the case for {}."""
    return Cell(bench, tuple(case.format(name) for name in names), peer, **more)


# -- tables in memory --------------------------------------------------------------------------


def _find(operation: str, *, own: bool = False) -> list[Cell | None]:
    peers = ("ska::flat_hash_map", "absl::flat_hash_map", "our find, all found" if own else None)
    return [
        None if peer is None else _each("index", f"{operation}, {{}}", THREADS, peer)
        for peer in peers
    ]


LOOKUPS = Table(
    "lookups",
    "Index of 36 M ids, 1 / 2 threads",
    ("`ska::flat_hash_map`", "`absl::flat_hash_map`", "own find, all present"),
    (
        ("find, all ids present", _find("find, all found")),
        ("find, half of them missing", _find("find, 50 % miss", own=True)),
        ("find and update scores", _find("training find")),
        ("insert new ids", _find("insert new")),
    ),
)


def _step(optimizer: str, peers: tuple[str | None, ...]) -> list[Cell | None]:
    return [
        None if peer is None else _each("train_step", f"{optimizer} D={dim} {{}}", DRAWS, peer)
        for peer in peers
        for dim in (64, 128)
    ]


_FBGEMM, _TORCH, _KERNEL = "FBGEMM CPU TBE", "nn.EmbeddingBag(sparse)", "reference kernel"
TRAINING = Table(
    "training-step",
    "Training step of 1 M rows, uniform / Zipf ids",
    (
        *("FBGEMM, D=64", "D=128", "`nn.EmbeddingBag`, D=64", "D=128"),
        *("reference kernel, D=64", "D=128"),
    ),
    (
        ("SGD", _step("SGD", (f"{_FBGEMM} SGD", f"{_TORCH} SGD", f"{_KERNEL} SGD"))),
        (
            "RowWiseAdagrad",
            _step(
                "RowWiseAdagrad",
                (f"{_FBGEMM} RowWiseAdagrad", None, f"{_KERNEL} RowWiseAdagrad"),
            ),
        ),
        ("Adagrad", _step("Adagrad", (f"{_FBGEMM} Adagrad", f"{_TORCH} Adagrad", None))),
    ),
)


def _call(name: str, peer: str) -> Line:
    modes = ("inference, {}", "training step, {}")
    cells = [
        Cell("overhead", (f"{name}, {mode.format(how)}",), peer)
        for how in ("eager", "compiled")
        for mode in modes
    ]
    return name, cells


CALLS = Table(
    "calls",
    "Smallest calls",
    ("inference, eager", "step, eager", "inference, compiled", "step, compiled"),
    (
        _call("1 id", "nn.Embedding"),
        _call("1 bag", "nn.EmbeddingBag"),
        _call("26 tables", "26 nn.EmbeddingBag"),
    ),
)


def _many(name: str, case: str) -> Line:
    peer = "a loop over nn.EmbeddingBag"
    step = (f"{case}: step",)
    return (
        name,
        [
            Cell("many_tables", step, peer, "ours_ms", "ms"),
            Cell("many_tables", step, peer, "us_each", "µs"),
            Cell("many_tables", step, peer),
        ],
    )


MANY = Table(
    "many-tables",
    "A step of many tables and features, batch 16",
    ("time", "of one", "/ a loop over `nn.EmbeddingBag`"),
    (
        *(_many(f"{n:,} tables", f"{n} tables") for n in (10, 100, 1000, 3000)),
        *(
            _many(f"{n:,} features of 10 tables", f"{n} features of 10 tables")
            for n in (10, 100, 1000, 10_000)
        ),
        *(
            _many(f"{n:,} bags of a table", f"batch {n} of a table")
            for n in (10_000, 100_000, 1_000_000)
        ),
    ),
)

_GROWN = ("bytes an id {}", "bytes an id {}, just after a growth")
MEMORY = Table(
    "memory",
    "Memory and growth",
    ("measured",),
    (
        *(
            (
                f"index {scores}, before / after a growth",
                [
                    Cell(
                        "index",
                        tuple(of.format(scores) for of in _GROWN),
                        "target",
                        "value",
                        "B/id",
                    )
                ],
            )
            for scores in ("without scores", "with scores")
        ),
        (
            "resident, D=64, Adam",
            [Cell("growth", ("resident memory",), "target", "value", "B/id")],
        ),
        (
            "insert from empty / into a reserved table",
            [Cell("growth", ("insert from empty",), "reserved table of ours")],
        ),
        (
            "stall of a growth, page faults apart",
            [
                Cell(
                    "growth",
                    ("stall of a growth step, page faults apart",),
                    "target",
                    "value",
                    "ns/id",
                )
            ],
        ),
    ),
)

# -- eviction ----------------------------------------------------------------------------------

_SCORES = ("LRU", "LFU")


def _evicting(operation: str, peer: str) -> list[Cell | None]:
    return [
        _each("lifecycle", f"{operation} with eviction, {score}, {{}}", THREADS, peer)
        for score in _SCORES
    ]


EVICTION = Table(
    "eviction",
    "Full table, 30 % new ids",
    _SCORES,
    (
        ("find_or_insert / known ids, 1 / 2 threads", _evicting("find_or_insert", "our known ids")),
        ("training step / known ids", _evicting("training step", "our known ids")),
        (
            "lookups / TorchRec MCH, which evicts every / every 10th step",
            [
                Cell(
                    "lifecycle",
                    (f"lookups with eviction, {score}",) * 2,
                    tuple(f"TorchRec MCH {score}, every {n}" for n in ("step", "10 steps")),
                )
                for score in _SCORES
            ],
        ),
        (
            "hit rate below the exact policy, capacity 1 / 10 / 30 % of the ids",
            [
                _each(
                    "lifecycle",
                    f"hit rate below exact {score}, capacity {{}} % of the ids",
                    (1, 10, 30),
                    "target",
                    shows="value",
                    unit="points",
                )
                for score in _SCORES
            ],
        ),
    ),
)

# -- whole models ------------------------------------------------------------------------------

TORCHREC = Table(
    "torchrec",
    "TorchRec, two ranks, RowWiseAdagrad",
    ("step", "1 % new ids", "step, dedup", "1 % new ids, dedup"),
    tuple(
        (
            f"{sharding}, bags of {length}",
            [
                Cell(
                    "torchrec_step",
                    (f"{sharding} RowWiseAdagrad L={length}{new}, dynamic{dedup}",),
                    "TorchRec's fused static tables",
                )
                for dedup in ("", ", dedup")
                for new in ("", ", 1 % new ids")
            ],
        )
        for sharding in ("row_wise", "table_wise")
        for length in (1, 10)
    ),
)


_DLRM_PEERS = (
    *("nn.EmbeddingBag by feature, vocabulary", "one nn.EmbeddingBag, vocabulary"),
    *("nn.EmbeddingBag by feature, hashing trick", "TorchRec's fused static tables, vocabulary"),
)
DLRM = Table(
    "dlrm",
    "Step of a whole DLRM, 26 features, row-wise Adagrad, eager / compiled",
    (
        *("`nn.EmbeddingBag` a feature", "one `nn.EmbeddingBag`"),
        *("hashing trick", "TorchRec's fused static tables"),
    ),
    tuple(
        (
            f"batch of {batch:,}",
            [
                _each("dlrm", f"rowwise-adagrad B={batch}, {{}}", ("eager", "compiled"), peer)
                for peer in _DLRM_PEERS
            ],
        )
        for batch in (2048, 8192)
    ),
)


def _engine(case: str) -> list[Cell | None]:
    return [
        Cell("ragged", (f"{lengths}, training {case}, EmbeddingEngine",), peer)
        for lengths in ("lengths 1-200, batch 2048", "lengths 1-3, batch 64")
        for peer in ("DynamicEmbedding by feature", "nn.EmbeddingBag by feature")
    ]


RAGGED = Table(
    "ragged",
    "EmbeddingEngine, 40 ragged features",
    (
        *("1-200 ids: one module a feature", "`nn.EmbeddingBag`"),
        *("1-3 ids: one module a feature", "`nn.EmbeddingBag`"),
    ),
    (("forward", _engine("forward")), ("training step", _engine("step"))),
)

# -- disks -------------------------------------------------------------------------------------


def _disk(bench: str, peer: str, *cases: str) -> list[Cell | None]:
    """Return time and ratio of cases."""
    return [
        Cell(bench, cases, peer, "ours_ms", "ms"),
        Cell(bench, cases, peer),
    ]


def _figure(bench: str, unit: str, *cases: str) -> list[Cell | None]:
    return [None, Cell(bench, cases, "target", "value", unit)]


_TIERED = "training step, Adam D=64, cache {}"
DISKS = Table(
    "disks",
    "Checkpoints, delta logs, rows in files",
    ("time", "ratio or figure"),
    (
        (
            "save 1 / 26 tables, 1 GB / `cp` and `sync`",
            _disk(
                "checkpoint",
                "cp and sync",
                *(f"save {n}, D=64, Adagrad" for n in ("1 table", "26 tables")),
            ),
        ),
        (
            "load them / `torch.load`",
            _disk(
                "checkpoint",
                "torch.load and load_state_dict",
                *(f"load {n}, D=64, Adagrad" for n in ("1 table", "26 tables")),
            ),
        ),
        (
            "stall of an asynchronous save / memcpy",
            _disk(
                "checkpoint",
                "memcpy into new memory",
                "stall of an asynchronous save, Adagrad D=64",
            ),
        ),
        (
            "step with a delta log / without",
            _disk("delta", "nothing recorded", "a training step, changes recorded"),
        ),
        (
            "publish of 100,000 rows: stall",
            _figure("delta", "s", "publish of a tenth of the rows, beside training"),
        ),
        (
            "training while publishing each half second / without",
            _figure("freshness", "", "training while publishing / without"),
        ),
        (
            "event to an answer that reflects it, p99",
            _figure("freshness", "s", "event to answer, p99"),
        ),
        (
            "20 kills of trainer and server: events lost, counted twice, mixed answers",
            _figure(
                *("freshness", ""),
                *("events lost", "events counted twice", "answers of two versions"),
            ),
        ),
        (
            "reads of 4 KB, io_uring / fio",
            _disk("tiers", "fio io_uring, depth 64", "random reads of 4 KB, uring"),
        ),
        (
            "step, all rows in the cache / in memory",
            _disk("tiers", "in memory", f"{_TIERED.format('100%')}, Zipf 1.05"),
        ),
        (
            "step, 25 % in the cache / in memory, Zipf 1.05 / 1.2 / 1.5",
            _disk(
                "tiers",
                "in memory",
                *(f"{_TIERED.format('25%')}, Zipf {zipf}" for zipf in (1.05, 1.2, 1.5)),
            ),
        ),
        (
            "likewise / a mapped file",
            _disk(
                "tiers",
                "mapped file",
                *(
                    f"training step, Adam D=64, memory for 25% of the rows, Zipf {zipf}"
                    for zipf in (1.05, 1.2, 1.5)
                ),
            ),
        ),
        (
            "reads of 512 B / RocksDB, 1 / 8 / 32 threads",
            [
                Cell(
                    "tiers",
                    ("random reads of 512 bytes",),
                    "RocksDB MultiGet, 1 threads",
                    "ours_ms",
                    "ms",
                ),
                Cell(
                    "tiers",
                    ("random reads of 512 bytes",) * 3,
                    tuple(f"RocksDB MultiGet, {n} threads" for n in (1, 8, 32)),
                ),
            ],
        ),
    ),
)

# -- retrieval ---------------------------------------------------------------------------------


def _search(rows: str) -> list[Cell | None]:
    case = (f"top_k, {rows}",)
    peers = ("torch.matmul and topk, chunks", "faiss IndexFlatIP")
    return [
        Cell("retrieval", case, peers[0], "ours_ms", "ms"),
        *(Cell("retrieval", case, peer) for peer in peers),
    ]


_STEP = ("step of a sampled softmax",)
_GIVEN = "nn.Embedding, given negatives"

RETRIEVAL = Table(
    "retrieval",
    "Retrieval: a million ids, D=64",
    ("time", "PyTorch", "faiss `IndexFlatIP`"),
    (
        (
            "an id of `sample_ids`, of 10 million",
            [Cell("retrieval", ("sample_ids, an id",), "target", "value", "ns"), None, None],
        ),
        (
            "step of `SampledSoftmaxLoss` / `nn.Embedding`, given negatives",
            [
                Cell("retrieval", _STEP, _GIVEN, "ours_ms", "ms"),
                Cell("retrieval", _STEP, _GIVEN),
                None,
            ],
        ),
        *(
            (f"`top_k` in {text}", _search(rows))
            for text, rows in (
                ("live rows / `matmul` and `topk`", "live"),
                ("frozen rows", "frozen"),
            )
        ),
    ),
)

# -- a GPU -------------------------------------------------------------------------------------

_OF_STATIC = tuple(f"nn.Embedding(sparse){optimizer}" for optimizer in ("", " SGD", " SparseAdam"))


def _of_gpu(how: str) -> list[Cell | None]:
    cases = tuple(
        f"{op}{how}, 10 tables, D=128, power law 1.05" for op in ("lookup", "SGD step", "Adam step")
    )
    return [
        Cell("gpu_published", cases, _OF_STATIC, shows="ours_ms", unit="ms"),
        Cell("gpu_published", cases, _OF_STATIC),
        Cell("gpu_published", cases, "static TBE, published for an H100"),
    ]


GPU = Table(
    "gpu-step",
    "10 tables, 1 M ids, D=128, power law 1.05, no pooling: lookup / SGD step / Adam step",
    ("ours", "`nn.Embedding(sparse=True)`", "FBGEMM's TBE on an H100, as DynamicEmb publishes it"),
    (
        ("replay of a graph", _of_gpu("")),
        ("eager", _of_gpu(", eager")),
    ),
)

TABLES = (
    GPU,
    *(LOOKUPS, TRAINING, CALLS, MEMORY, EVICTION),
    *(DLRM, TORCHREC, RAGGED, DISKS, SERVING, RETRIEVAL),
)
