"""Tables of served models."""

from __future__ import annotations

from .tables import Cell, Table


def _packaged(case: str) -> list[Cell | None]:
    return [
        Cell("serving", (f"{language}, {case}, p50",), "nn.EmbeddingBag, AOTI", shows, unit, scale)
        for language in ("Python", "C++")
        for shows, unit, scale in (("ours_ms", "µs", 1e3), ("ratio", "", 1.0))
    ]


def _large(case: str, peer: str, *languages: str) -> list[Cell | None]:
    cells: list[Cell | None] = []
    for language in ("Python", "C++"):
        name = (f"{language}, B=256 L=20, {case}",)
        wanted = language in languages
        cells.append(Cell("serving", name, peer, "ours_ms", "µs", 1e3) if wanted else None)
        cells.append(Cell("serving", name, peer) if wanted else None)
    return cells


SERVING = Table(
    "serving",
    "Packages of 8 tables",
    ("Python, p50", "ratio", "C++, p50", "ratio"),
    (
        ("1 sample, 1 id a feature / `nn.EmbeddingBag`", _packaged("B=1 L=1")),
        ("256 samples, 1 id", _packaged("B=256 L=1")),
        ("256 samples, 20 ids", _packaged("B=256 L=20")),
        (
            "two runners / one, time a call",
            _large("two runners, time a call", "one thread", "Python", "C++"),
        ),
        (
            "p99 beside 100,000 updated rows a second / none",
            _large("100000 rows a second updated, p99", "no updates", "C++"),
        ),
    ),
)


def _loaded(server: str) -> list[Cell | None]:
    peer = "nn.EmbeddingBag, the same server"
    capacity = (f"{server}, capacity, time a request",)
    late = tuple(f"{server}, {share} % of the capacity, p99" for share in (50, 80, 95))
    return [
        Cell("serving_load", capacity, peer, "rate"),
        Cell("serving_load", capacity, peer, "peer_rate"),
        Cell("serving_load", late, peer, "ours_min_ms", "ms"),
        Cell("serving_load", late, peer, "peer_min_ms", "ms"),
    ]


SERVING_LOAD = Table(
    "serving-load",
    "HTTP servers, 8 tables, 1 sample of 1 id a feature",
    (
        "requests/s",
        "`nn.EmbeddingBag`",
        "p99 at 50 / 80 / 95 % of them, best round",
        "`nn.EmbeddingBag`",
    ),
    tuple(
        (name, _loaded(server))
        for name, server in (
            ("Python", "Python"),
            ("Python, `--max-batch 64`", "Python, batches"),
            ("C++", "C++"),
        )
    ),
)


def _in_file(exponent: float, cached: int) -> list[Cell | None]:
    cases = tuple(f"Zipf {exponent:g}, {cached} % cached, {which}" for which in ("p50", "p99"))
    return [
        Cell("file_rows", cases, "rows in memory", "ours_ms", "ms"),
        Cell("file_rows", cases, "rows in memory", "peer_ms", "ms"),
        Cell("file_rows", cases, "RocksDB", "peer_ms", "ms"),
        Cell("file_rows", cases[:1], "RocksDB"),
    ]


FILE_ROWS = Table(
    "file-rows",
    "Rows in a file: 2,560 ids a call of 2 M rows of 64 float32",
    ("p50 / p99", "rows in memory", "RocksDB, rows only", "p50 / RocksDB"),
    tuple(
        (f"Zipf {exponent:g}, {cached} % of the rows in the cache", _in_file(exponent, cached))
        for exponent in (1.05, 1.2)
        for cached in (5, 25, 100)
    ),
)


def _updated(case: str, shows: str, peer: str = "") -> Cell:
    name = f"updates, Zipf 1.05, 25 % cached: {case}"
    return Cell("file_rows", (f"{name}, p50", f"{name}, p99"), peer, shows, "ms")


def _updates(case: str, unit: str, scale: float = 1.0) -> Cell:
    name = f"updates, Zipf 1.05, 25 % cached: {case}"
    return Cell("file_rows", (name,), "", "value", unit, scale)


_UNCHANGED = "rows in a file that do not change"
LIVE_FILES = Table(
    "live-files",
    "The same at Zipf 1.05 and 25 %, with changes of 5 % of the ids in memory",
    ("live tables", "rows that do not change"),
    (
        (
            "lookups, half of the headroom in use: p50 / p99",
            (
                _updated("half of the headroom", "ours_ms", _UNCHANGED),
                _updated("half of the headroom", "peer_ms", _UNCHANGED),
            ),
        ),
        (
            "lookups beside a thread that updates: p50 / p99",
            (_updated("beside a writer", "ours_ms"), None),
        ),
        ("updates into memory, 1,000 ids a second", (_updates("ids into memory", "", 1e-3), None)),
        ("a file written anew", (_updates("a file written anew", "s"), None)),
        ("updates in all, 1,000 ids a second", (_updates("ids in all", "", 1e-3), None)),
    ),
)


def _shared(case: str, unit: str, scale: float = 1.0) -> list[Cell | None]:
    return [
        Cell("shared_tables", (case,), "tables of its own", shows, unit, scale)
        for shows in ("ours_ms", "peer_ms")
    ]


SHARED_TABLES = Table(
    "shared-tables",
    "Three processes, one package of 2 M rows of 64 float32",
    ("`shared_memory=`", "tables of its own"),
    (
        (
            "memory of all (sum of `Pss`, torch's own included)",
            [
                Cell("shared_tables", (f"memory of 3 processes, {how}",), "", "value", "MiB")
                for how in ("shared", "each its own")
            ],
        ),
        (
            "second process, `load` to the first answer",
            _shared("second process, load to the first answer", "ms"),
        ),
        ("256 bags of 20 ids, p50", _shared("256 bags of 20, p50", "µs", 1e3)),
        ("one id, p50", _shared("1 bags of 1, p50", "µs", 1e3)),
    ),
)
