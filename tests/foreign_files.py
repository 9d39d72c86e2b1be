"""Files of other programs, written by NumPy alone, from the descriptions of their formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
SAFETENSORS = {"int64": "I64", "float32": "F32", "float16": "F16", "float64": "F64", "int8": "I8"}


@dataclass
class Rows:
    """What a table holds, by id.

    Attributes:
        ids: int64 [n].
        values: float32 [n, dim].
        state: by name, [n, dim], or [n, 1] where a row has one value.
        scores: by name, int64 [n].
    """

    ids: Array
    values: Array
    state: dict[str, Array] = field(default_factory=dict)
    scores: dict[str, Array] = field(default_factory=dict)

    def part(self, chosen: Array) -> Rows:
        """Some of them."""
        return Rows(
            self.ids[chosen],
            self.values[chosen],
            {name: of[chosen] for name, of in self.state.items()},
            {name: of[chosen] for name, of in self.scores.items()},
        )


def some_rows(count: int, dim: int, *, seed: int = 0, per_row: bool = False) -> Rows:
    """Rows with the state of Adagrad, of any 64-bit ids, negative ones and the extremes too."""
    draw = np.random.default_rng(seed)
    ids = draw.permutation(np.arange(count) - count // 2).astype(np.int64) * 977
    ids[:2] = [-(2**63), 2**63 - 1]
    values = draw.normal(size=(count, dim)).astype(np.float32)
    sums = draw.random((count, 1 if per_row else dim)).astype(np.float32)
    counts = draw.integers(1, 100, count).astype(np.int64)
    return Rows(ids, values, {"sum": sums}, {"frequency": counts})


def write_dynamicemb(
    folder: Path,
    table: str,
    rows: Rows,
    *,
    ranks: int = 1,
    options: Mapping[str, object] | None = None,
    scores: Sequence[str] = (),
    state: Sequence[str] = (),
    state_file: str = "emb_opt_values",
    counter: Mapping[int, int] | None = None,
) -> None:
    """A dump of DynamicEmb: raw files by rank, where rank R has the keys of R modulo the ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    if options is not None:
        (folder / f"{table}_opt_args.json").write_text(json.dumps(options))
    for rank in range(ranks):
        own = rows.part(np.mod(rows.ids, ranks) == rank)
        end = f".rank_{rank}.world_size_{ranks}"
        own.ids.astype("<i8").tofile(folder / f"{table}_emb_keys{end}")
        own.values.astype("<f4").tofile(folder / f"{table}_emb_values{end}")
        if scores:
            block = np.stack([own.scores[name] for name in scores], 1)
            block.astype("<i8").tofile(folder / f"{table}_emb_scores{end}")
        if state:
            block = np.concatenate([own.state[name] for name in state], 1)
            block.astype("<f4").tofile(folder / f"{table}_{state_file}{end}")
        if counter is not None:
            seen = {key: count for key, count in counter.items() if key % ranks == rank}
            keys, counts = np.array([*seen], "<i8"), np.array([*seen.values()], "<i8")
            keys.tofile(folder / f"{table}_counter_keys{end}")
            counts.tofile(folder / f"{table}_counter_frequencies{end}")


def read_dynamicemb_dump(folder: Path, table: str, dim: int) -> tuple[Rows, dict[str, object]]:
    """What the files of a dump hold, and its JSON; scores and state are blocks of all of them."""
    found = {}
    for item, kind in (
        ("emb_keys", "<i8"),
        ("emb_values", "<f4"),
        ("emb_scores", "<i8"),
        ("emb_opt_values", "<f4"),
    ):
        paths = sorted(folder.glob(f"{table}_{item}.rank_*"))
        if paths:
            assert len(paths) == int(paths[0].name.rpartition("_")[2])
            found[item] = np.concatenate([np.fromfile(path, kind) for path in paths])
    ids = found["emb_keys"]
    of_all = {
        name: {"all": found[item].reshape(len(ids), -1)} if item in found else {}
        for name, item in (("state", "emb_opt_values"), ("scores", "emb_scores"))
    }
    rows = Rows(ids, found["emb_values"].reshape(-1, dim), of_all["state"], of_all["scores"])
    return rows, json.loads((folder / f"{table}_opt_args.json").read_text())


def write_safetensors(path: Path, tensors: Mapping[str, Array], dense: Sequence[str]) -> None:
    """A file as RecIS writes it: each entry says also whether it is of the dense part."""
    header, begin = {}, 0
    for name, values in tensors.items():
        end = begin + values.nbytes
        kind = "bool" if values.dtype == np.bool_ else SAFETENSORS[str(values.dtype)]
        header[name] = {
            "dtype": kind,
            "shape": list(values.shape),
            "data_offsets": [begin, end],
            "dense": name in dense,
        }
        begin = end
    text = json.dumps(header).encode()
    data = b"".join(values.tobytes() for values in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_recis(
    folder: Path,
    table: str,
    rows: Rows,
    *,
    ranks: int = 1,
    slots: Mapping[str, Array],
    dense: Mapping[str, Array] | None = None,
    size: int = 65536,
) -> None:
    """A checkpoint of RecIS with one table; ids are dealt to ranks by slots of their own.

    Args:
        slots: by name, [n, ...], beside ``id`` and ``embedding``.
        dense: tensors of the first file that are of no table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    keys_path = folder / "tensorkey.json"
    keys = json.loads(keys_path.read_text()) if keys_path.exists() else {}
    owner = np.mod(rows.ids, ranks)
    bounds = [rank * size // ranks for rank in range(ranks + 1)]
    for rank in range(ranks):
        chosen = owner == rank
        tensors: dict[str, Array] = {}
        if rank == 0:
            tensors |= {f"{name}^ ": values for name, values in (dense or {}).items()}
        flat = [*tensors]
        for slot, values in {"id": rows.ids, "embedding": rows.values, **slots}.items():
            key = f"{table}.{slot}/part_{rank}_{ranks}"
            tensors[key] = values[chosen]
            keys[key] = f"{table}@{slot}^{bounds[rank]}@{bounds[rank + 1]}@{size}"
        path = folder / f"model-{rank:06}-of-{ranks:06}.safetensors"
        write_safetensors(path, tensors, flat)
    keys_path.write_text(json.dumps(keys, indent=4))
