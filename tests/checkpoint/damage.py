"""Damage to the files of a checkpoint, and checkpoints with edited manifests."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.checkpoint.file_names import MANIFEST
from torch_dynemb.files.tensor_file import StoredTensor, sections_of

Damage = Callable[[Path], None]


def copied(folder: Path, to: Path) -> Path:
    """Copy a folder with hard links; :func:`rewrite_file` breaks the link of a file."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to, copy_function=os.link)
    return to


def rewrite_file(path: Path, change: Callable[[bytearray], object]) -> None:
    """Writes a file anew."""
    data = bytearray(path.read_bytes())
    change(data)
    path.unlink()
    path.write_bytes(data)


def put_text(path: Path, text: bytes) -> None:
    """Gives a file another content."""
    rewrite_file(path, lambda data: data.__setitem__(slice(None), text))


def flip(offset: int, bit: int = 0) -> Damage:
    """Flips a bit of a file."""

    def of_data(data: bytearray) -> None:
        data[offset] ^= 1 << bit

    return lambda path: rewrite_file(path, of_data)


def cut(size: int) -> Damage:
    """Keeps the beginning."""

    def of_data(data: bytearray) -> None:
        del data[size:]

    return lambda path: rewrite_file(path, of_data)


def append(path: Path) -> None:
    """Adds a byte."""
    rewrite_file(path, lambda data: data.append(0))


def become_a_folder(path: Path) -> None:
    """Puts a folder in place of a file."""
    path.unlink()
    path.mkdir()


def files_of(folder: Path) -> list[Path]:
    """All files but the manifest, within the folder."""
    found = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in found if path.name != MANIFEST]


def tensors_of(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return sections_of(data[8 : 8 + length], 8 + length, len(data))


def damages_of(path: Path) -> Iterator[tuple[str, Damage]]:
    """Damage to every part of a file of tensors, by name."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    json_end = 8 + len(data[8 : 8 + length].rstrip())
    yield "header length", flip(1, 3)
    yield "header", flip((8 + json_end) // 2, 1)
    yield "padding", flip(json_end + 1)
    for name, section in tensors_of(path).items():
        if section.bytes > 0:
            yield f"begin of {name}", flip(section.begin, 4)
            yield f"end of {name}", flip(section.begin + section.bytes - 1, 6)
    for size in sorted({0, 4, 8, json_end, 8 + length, len(data) - 1}):
        if size < len(data):
            yield f"cut to {size} bytes", cut(size)
    yield "a byte more", append
    yield "removed", Path.unlink
    yield "a folder", become_a_folder


# -- edited manifests ----------------------------------------------------------------------------


def canonical(content: Any) -> bytes:
    """JSON text as checksums are made of it."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def crc32c(data: bytes) -> int:
    """The checksum of bytes."""
    return ops.crc32c(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else 0


def read_manifest_text(folder: Path) -> dict[str, Any]:
    """What the manifest says, without its checksum."""
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    del content["crc32c"]
    return content


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Writes a manifest with the right checksum."""
    text = canonical({**content, "crc32c": crc32c(canonical(content))})
    put_text(folder / MANIFEST, text)


def saved_files(content: Any) -> Iterator[dict[str, Any]]:
    """The entries of a manifest that describe files."""
    if isinstance(content, dict):
        if "block_bytes" in content:
            yield content
            return
        content = list(content.values())
    if isinstance(content, list):
        for value in content:
            yield from saved_files(value)


def seal(folder: Path) -> None:
    """Computes all sizes and checksums again."""
    content = read_manifest_text(folder)
    for file in saved_files(content):
        data, size = (folder / file["path"]).read_bytes(), file["block_bytes"]
        file["bytes"] = len(data)
        file["crc32c"] = [crc32c(data[k : k + size]) for k in range(0, len(data), size)]
    write_manifest(folder, content)


def change_tensor(path: Path, name: str, change: Callable[[Tensor], object]) -> None:
    """Changes the values of a tensor in a file."""
    section = tensors_of(path)[name]

    def of_data(data: bytearray) -> None:
        end = section.begin + section.bytes
        values = torch.frombuffer(bytearray(data[section.begin : end]), dtype=section.dtype)
        change(values.view(section.shape))
        data[section.begin : end] = bytes(values.view(torch.uint8).tolist())

    rewrite_file(path, of_data)


def leaves_of(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in JSON, inner ones and outer ones."""
    if path:
        yield path
    items: Any = ()
    if isinstance(content, dict):
        items = content.items()
    elif isinstance(content, list):
        items = list(enumerate(content))[:2]  # of a list, others are as these
    for key, value in items:
        yield from leaves_of(value, (*path, key))


def replaced(content: Any, path: tuple[Any, ...], value: Any) -> None:
    """Puts another value in a place."""
    for key in path[:-1]:
        content = content[key]
    content[path[-1]] = value


def value_at(content: Any, path: tuple[Any, ...]) -> Any:
    """The value in a place."""
    for key in path:
        content = content[key]
    return content
