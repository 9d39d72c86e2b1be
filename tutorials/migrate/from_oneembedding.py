"""From OneEmbedding: its snapshot becomes one of ours, which the same program loads.

OneFlow has no release for today's machines; where it is not installed, a small snapshot is written
in its layout. ``--path``, once for the folder of each rank, and ``--snapshot`` take one of yours.
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

from torch_dynemb import oneembedding as flow

DIM, BLOCK = 8, 4096  # bytes of a sector, the default of OneEmbedding


def write_snapshot(folder: Path, name: str, keys: Tensor, values: Tensor) -> None:
    """Write a table as OneFlow does: keys, values in blocks of a sector, and which rows count."""
    for part in ("keys", "values", f"snapshots/{name}"):
        (folder / part).mkdir(parents=True)
    value_bytes = values.shape[1] * 4
    sizes = {"KEY_SIZE": 8, "VALUE_SIZE": value_bytes, "PHYSICAL_BLOCK_SIZE": BLOCK}
    for size, number in {**sizes, "NUM_LOGICAL_BLOCKS_PER_CHUNK": 1 << 20}.items():
        (folder / size).write_text(f"{number}\n")
    (folder / "LOCK").touch()
    in_block = BLOCK // value_bytes
    (folder / "keys/key-000000000000").write_bytes(keys.numpy().tobytes())
    blocks = [some.numpy().tobytes().ljust(BLOCK, b"\0") for some in values.split(in_block)]
    (folder / "values/value-000000000000").write_bytes(b"".join(blocks))
    rows = torch.arange(keys.numel())
    (folder / f"snapshots/{name}/index-000000000000").write_bytes(rows.numpy().tobytes())
    (folder / f"snapshots/{name}/LIST").write_text("index-000000000000\n")


def embedding(path: Path) -> flow.MultiTableEmbedding:
    """Return what a program of OneEmbedding makes; all of this is as it was before."""
    return flow.MultiTableEmbedding(
        name="users",
        embedding_dim=DIM,
        dtype=torch.float32,
        key_type=torch.int64,
        tables=[flow.make_table(flow.make_normal_initializer(mean=0.0, std=0.05))],
        store_options=flow.make_device_mem_store_options(
            persistent_path=str(path), capacity=10_000, size_factor=3
        ),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Move a snapshot of OneFlow, or one that is made for the purpose."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", action="append", help="folder of a rank, such as /data/0-2")
    parser.add_argument("--snapshot", default="final", help="name of the snapshot")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        users = embedding(Path(folder) / "ours")
        flow.Optimizer(torch.optim.Adam(users.parameters(), lr=0.1), [users])
        paths, rows = arguments.path, None
        if paths is None:
            if importlib.util.find_spec("oneflow") is None:
                print("OneFlow is not installed: a snapshot is made up in its place")
            draw = torch.Generator().manual_seed(0)
            keys = torch.randint(0, 2**40, (100,), generator=draw)
            values = torch.randn(100, 3 * DIM, generator=draw)  # rows, then both moments of Adam
            values[:, 2 * DIM :] = values[:, 2 * DIM :].square()
            paths, rows = [str(Path(folder) / "theirs")], (keys, values[:, :DIM])
            write_snapshot(Path(paths[0]), arguments.snapshot, keys, values)
        report = flow.import_snapshot(users, paths, arguments.snapshot, optimizer_steps=1000)
        users.eval()
        (table,) = report.tables.values()
        result: dict[str, object] = {"ids": table.ids, "fresh": table.fresh}
        if rows is not None:
            result["same_rows"] = torch.equal(users(rows[0][:, None])[:, 0], rows[1])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
