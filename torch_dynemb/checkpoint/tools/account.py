"""Description of a checkpoint, from its manifest and the headers of the dense files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch_dynemb.checkpoint.reading.dense_files import dense_shapes
from torch_dynemb.checkpoint.reading.reader import Checkpoint
from torch_dynemb.console.lines import aligned, in_bytes, optimizer_name
from torch_dynemb.parts.saved_tables import NO_GROUP, SavedFile, SavedPart, SavedTable


def account(saved: Checkpoint) -> dict[str, Any]:
    """Describe the content of a checkpoint as JSON values.

    Raises:
        DamagedFileError: a dense file is damaged or missing.
    """
    manifest = saved.manifest
    tables = {name: _table(table) for name, table in manifest.tables.items()}
    entries = {
        name: {
            "dtype": str(dtype).removeprefix("torch."),
            "shape": list(shape),
            "pieces": len(manifest.dense.entries[name]),
        }
        for name, (dtype, shape) in dense_shapes(saved.folder, manifest.dense).items()
    }
    return {
        "path": str(saved.folder),
        "uuid": saved.uuid,
        "kind": saved.kind,
        "parent": manifest.parent,
        "ranks": saved.ranks,
        **_sizes(manifest.files()),
        "tables": tables,
        "groups": [
            {"rank": group.rank, "tables": group.tables, "scores": group.score_words}
            for group in manifest.groups
        ],
        "dense": {"entries": entries, **_sizes(manifest.dense.files)},
        "state": {"tensors": len(manifest.state.entries), **_sizes(manifest.state.files)},
    }


def _sizes(files: Iterable[SavedFile]) -> dict[str, int]:
    by_path = {file.path: file.bytes for file in files}
    return {"files": len(by_path), "bytes": sum(by_path.values())}


def _table(table: SavedTable) -> dict[str, Any]:
    first = table.first_parts
    return {
        "embedding_dim": table.embedding_dim,
        "dtype": table.dtype,
        "ids": table.ids,
        "removed": sum(part.removed_ids for part in first),
        "waiting": sum(part.counted for part in first),
        "sketch_width": max((part.sketch_width for part in first), default=0),
        "seed": table.seed,
        "optimizer": table.optimizer,
        "optimizer_steps": max((part.optimizer_steps for part in table.parts), default=0),
        "hyper": table.hyper,
        "scores": table.scores,
        "policy": table.policy,
        "step": table.step,
        "now": table.now,
        "places": all(part.group != NO_GROUP for part in table.parts),
        **_sizes(file for part in table.parts for file in part.files),
        "parts": [_part(part) for part in table.parts],
    }


def _part(part: SavedPart) -> dict[str, Any]:
    return {
        "rank": part.rank,
        "columns": [part.first_column, part.first_column + part.columns],
        "slots": [part.slots_begin, part.slots_end, part.slots],
        "ids": part.ids,
        "waiting": part.counted,
        **_sizes(part.files),
    }


def described(about: dict[str, Any]) -> str:
    """Format a description as text.

    Args:
        about: result of :func:`account`.
    """
    lines = [
        f"{about['path']}: {about['kind']} checkpoint {about['uuid']}, "
        f"{about['ranks']} rank{'s' * (about['ranks'] != 1)}, {about['files']} files, "
        f"{in_bytes(about['bytes'])}"
    ]
    if about["parent"] is not None:
        gone = sum(table["removed"] for table in about["tables"].values())
        lines += [
            f"an increment of the checkpoint {about['parent']}: changed ids, and {gone} removed ids"
        ]
    if about["tables"]:
        lines += ["", *_table_lines(about["tables"])]
    parts = {name: table["parts"] for name, table in about["tables"].items()}
    if any(len(of) > 1 for of in parts.values()):
        lines += ["", *_part_lines(parts)]
    if about["groups"]:
        lines += ["", "groups of tables, which the same model loads exactly:"]
        lines += [f"rank {of['rank']}: {', '.join(of['tables'])}" for of in about["groups"]]
    elif about["tables"]:
        lines += ["", "places of ids and rows were not saved: a load assigns new ones"]
    dense = about["dense"]
    lines += ["", f"dense state: {len(dense['entries'])} tensors, {in_bytes(dense['bytes'])}"]
    if dense["entries"]:
        lines += aligned(
            [
                [name, of["dtype"], "x".join(map(str, of["shape"])) or "scalar"]
                for name, of in dense["entries"].items()
            ]
        )
    state = about["state"]
    lines += ["", f"state of the program: {state['tensors']} tensors, {in_bytes(state['bytes'])}"]
    return "\n".join(lines)


_HEADINGS = ("dim", "dtype", "ids", "waiting", "parts", "files", "bytes", "optimizer", "steps")
_POLICY_HEADINGS = ("step", "scores", "capacity", "admission")


def _table_lines(tables: dict[str, Any]) -> list[str]:
    rows = [["table", *_HEADINGS, *_POLICY_HEADINGS]]
    for name, of in tables.items():
        rows.append(
            [
                name,
                str(of["embedding_dim"]),
                of["dtype"],
                str(of["ids"]),
                str(of["waiting"]),
                str(len(of["parts"])),
                str(of["files"]),
                in_bytes(of["bytes"]),
                optimizer_name(of["optimizer"]),
                str(of["optimizer_steps"]),
                str(of["step"]),
                "+".join(of["scores"]) or "-",
                str(of["policy"]["capacity"] or "-"),
                of["policy"]["admission"] or "-",
            ]
        )
    return aligned(rows)


def _part_lines(tables: dict[str, list[dict[str, Any]]]) -> list[str]:
    rows = [["part of", "rank", "columns", "slots", "ids", "files", "bytes"]]
    for name, parts in tables.items():
        for of in parts:
            begin, end, slots = of["slots"]
            rows.append(
                [
                    name,
                    str(of["rank"]),
                    f"{of['columns'][0]}-{of['columns'][1]}",
                    f"{begin}-{end} of {slots}",
                    str(of["ids"]),
                    str(of["files"]),
                    in_bytes(of["bytes"]),
                ]
            )
    return aligned(rows)


__all__ = ["account", "described"]
