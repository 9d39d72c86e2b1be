"""From RecIS: an engine of the same options takes the tables of a checkpoint.

RecIS needs a GPU; where it is not installed, a small checkpoint is written as RecIS would have
written it. ``--checkpoint`` and ``--table`` take one of yours.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torch_dynemb import migrate, recis

DIM = 8


def write_checkpoint(folder: Path, table: str, ids: Tensor, slots: dict[str, Tensor]) -> None:
    """Write a table as one rank of RecIS does: safetensors, and a map of names."""
    tensors = {"id": ids, **slots}
    header, keys, begin = {}, {}, 0
    for slot, values in tensors.items():
        name, end = f"{table}.{slot}/part_0_1", begin + values.nbytes
        kind = "I64" if values.dtype == torch.int64 else "F32"
        header[name] = {
            "dtype": kind,
            "shape": list(values.shape),
            "data_offsets": [begin, end],
            "dense": False,
        }
        keys[name] = f"{table}@{slot}^0@65536@65536"
        begin = end
    text = json.dumps(header).encode()
    data = b"".join(values.numpy().tobytes() for values in tensors.values())
    path = folder / "model-000000-of-000001.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "tensorkey.json").write_text(json.dumps(keys))


def move(folder: Path, table: str) -> tuple[recis.EmbeddingEngine, dict[str, object]]:
    """Load a table of a checkpoint into an engine."""
    source = migrate.read_recis(folder, table)
    options = recis.EmbeddingOption(
        embedding_dim=source.embedding_dim, shared_name=table, combiner="sum"
    )
    engine = recis.EmbeddingEngine({table: options})  # as with RecIS
    recis.SparseAdamW(recis.filter_out_sparse_param(engine), lr=0.01)
    report = migrate.load(engine, {table: source})[table]
    return engine, {"ids": report.ids, "fresh": report.fresh, "left_out": report.left_out}


def main(argv: Sequence[str] | None = None) -> None:
    """Move a checkpoint of RecIS, or one that is made for the purpose."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, help="folder with tensorkey.json")
    parser.add_argument("--table", default="user_id", help="name of a logical table in it")
    arguments = parser.parse_args(argv)
    if arguments.checkpoint is not None:
        print(json.dumps(move(arguments.checkpoint, arguments.table)[1]))
        return
    if importlib.util.find_spec("recis") is None:
        print("RecIS is not installed: a checkpoint is made up in its place")
    with tempfile.TemporaryDirectory() as folder:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(-(2**62), 2**62, (100,), generator=draw)
        rows = torch.randn(100, DIM, generator=draw)
        moments = {"exp_avg": rows * 0.1, "exp_avg_sq": rows.square()}
        slots = {f"sparse_adamw_{name}": values for name, values in moments.items()}
        write_checkpoint(Path(folder), "user_id", ids, {"embedding": rows, **slots})
        engine, told = move(Path(folder), "user_id")
    engine.eval()
    same = torch.equal(engine({"user_id": ids[:, None]})["user_id"], rows)
    print(json.dumps({"same_rows": same, **told}))


if __name__ == "__main__":
    main()
