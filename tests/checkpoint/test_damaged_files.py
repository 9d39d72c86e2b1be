"""Damaged checkpoints are refused with file and reason, and nothing has changed."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import damage
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from whole_model import KINDS, WholeModel, content, make, same, save_trained, whole_state

from torch_dynemb import checkpoint
from torch_dynemb.checkpoint.file_names import MANIFEST

pytestmark = pytest.mark.cpu_only("is about files, which are read into memory of the CPU")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained(tmp_path_factory.mktemp("saved") / "last")


def reads(kind: str, file: Path) -> bool:
    """Whether a kind of model needs a file.

    The file of a group is of use only where it is the same group, and that has counts of
    admission, too.
    """
    if file.parent.name == "groups":
        return "other" not in kind
    return "other" in kind or not file.name.startswith(("sketch", "counts"))


class Refusing:
    """Models that are given one damaged checkpoint after another, and must not change.

    Args:
        kinds: of the models, which take turns.
    """

    def __init__(self, *kinds: str) -> None:
        self._models = [(kind, make(kind)) for kind in kinds]
        self._states = [whole_state(model) for _, model in self._models]
        self._turns = itertools.cycle(range(len(kinds)))

    def refuse(self, path: Path, what: str, match: str, file: Path | None = None) -> None:
        """Check that the next model rejects a checkpoint.

        Args:
            path: of the checkpoint.
            what: has been done to it.
            match: in the message.
            file: what is damaged, where not all models read it.
        """
        number = next(self._turns)
        kind, model = self._models[number]
        if file is not None and not reads(kind, file):
            return
        error: BaseException | None = None
        try:
            checkpoint.load(path, model)
        except (ValueError, FileNotFoundError) as raised:
            error = raised
        assert error is not None, f"{what}, {kind}: loaded"
        assert match in str(error), f"{what}, {kind}: {error}"
        assert same(whole_state(model), self._states[number]), f"{what}, {kind}: {error}"

    def check_training(self) -> None:
        """They train on as if nothing had been."""
        for kind, model in self._models:
            other = make(kind)
            for each in (model, other):
                each.train_steps(range(20, 23))
            assert same(content(model), content(other)), kind


@pytest.fixture(scope="module")
def refusing() -> Iterator[Refusing]:
    """One for all tests of this file: they leave the models as they are."""
    models = Refusing(*KINDS)
    yield models
    models.check_training()


def check_damaged_files(saved: Path, folder: Path, refusing: Refusing, step: int = 1) -> int:
    count = 0
    for file in damage.files_of(saved):
        for what, harm in list(damage.damages_of(saved / file))[count % step :: step]:
            path = damage.copied(saved, folder / "last")
            harm(path / file)
            refusing.refuse(path, f"{file}, {what}", str(path / file), file)
            count += 1
    return count


@pytest.mark.long
def test_damaged_file_is_refused(saved: Path, tmp_path: Path, refusing: Refusing) -> None:
    """Half of the damage, and kinds of models take turns."""
    assert check_damaged_files(saved, tmp_path, refusing, step=2) > 80


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_refuses(kind: str, saved: Path, tmp_path: Path) -> None:
    refusing = Refusing(kind)
    check_damaged_files(saved, tmp_path, refusing)
    refusing.check_training()


def test_files_in_each_others_place_are_refused(
    saved: Path, tmp_path: Path, refusing: Refusing
) -> None:
    sizes: dict[int, list[Path]] = {}
    for file in damage.files_of(saved):
        sizes.setdefault((saved / file).stat().st_size, []).append(file)
    path = damage.copied(saved, tmp_path / "last")
    first, second = (tmp_path / "last" / file for file in damage.files_of(saved)[:2])
    size = max(first.stat().st_size, second.stat().st_size)
    for file in (first, second):  # of one size
        damage.rewrite_file(file, lambda data: data.extend(bytes(size - len(data))))
    damage.seal(path)
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    for _ in KINDS:
        refusing.refuse(path, "swapped", str(path))


def test_damaged_manifest_is_refused(saved: Path, tmp_path: Path, refusing: Refusing) -> None:
    """A flip in every entry, cuts, other content."""
    text = (saved / MANIFEST).read_bytes()
    for offset in range(0, len(text), 53):
        path = damage.copied(saved, tmp_path / "last")
        damage.flip(offset, offset % 7)(path / MANIFEST)
        refusing.refuse(path, f"byte {offset}", str(path / MANIFEST))
    for size in (0, 1, len(text) // 2, len(text) - 1):
        path = damage.copied(saved, tmp_path / "last")
        damage.cut(size)(path / MANIFEST)
        refusing.refuse(path, f"cut to {size}", str(path / MANIFEST))
    others = [b"{}", b"[]", b"null", b"[" * 100_000, b'{"format": 1e999}', b"\xff\xfe", b"3" * 5000]
    others += [text[:-1] + b', "x": NaN}', text.replace(b'"uuid"', b'"uuld"'), text + b"x"]
    for other in others:
        path = damage.copied(saved, tmp_path / "last")
        damage.rewrite_file(
            path / MANIFEST, lambda data, to=other: data.__setitem__(slice(None), to)
        )
        refusing.refuse(path, str(other[:20]), str(path / MANIFEST))


def test_missing_manifest_is_no_checkpoint(saved: Path, tmp_path: Path, refusing: Refusing) -> None:
    path = damage.copied(saved, tmp_path / "last")
    (path / MANIFEST).unlink()
    refusing.refuse(path, "removed", "is not a checkpoint: it has no manifest.json")
    (path / MANIFEST).mkdir()
    refusing.refuse(path, "a folder", "is not a checkpoint: it has no manifest.json")
    with pytest.raises(FileExistsError, match="exists but is not a checkpoint"):
        checkpoint.save(path, WholeModel())
    shutil.rmtree(path)
    refusing.refuse(path, "nothing there", "is not a checkpoint: it does not exist")


@pytest.mark.parametrize("checksum", ["right", "wrong"])
def test_another_format_or_version_is_refused(
    checksum: str, saved: Path, tmp_path: Path, refusing: Refusing
) -> None:
    for name, value, match in (
        ("version", 2, "has format version 2, but this torch_dynemb reads 1"),
        ("version", None, "has format version None"),
        ("format", "another", "is not the manifest of a torch_dynemb checkpoint"),
    ):
        path = damage.copied(saved, tmp_path / "last")
        manifest = damage.read_manifest_text(path)
        manifest[name] = value
        if checksum == "right":
            damage.write_manifest(path, manifest)
        else:
            text = json.dumps({**manifest, "crc32c": 1}).encode()
            damage.put_text(path / MANIFEST, text)
        refusing.refuse(path, name, match)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.generate],  # models take turns, so a case is not repeated with the same one
)
@given(data=st.data())
def test_any_flipped_bit_is_found(
    data: st.DataObject, saved: Path, tmp_path: Path, refusing: Refusing
) -> None:
    file = data.draw(st.sampled_from([*damage.files_of(saved), Path(MANIFEST)]))
    offset = data.draw(st.integers(0, (saved / file).stat().st_size - 1))
    path = damage.copied(saved, tmp_path / "last")
    damage.flip(offset, data.draw(st.integers(0, 7)))(path / file)
    refusing.refuse(path, f"{file}, byte {offset}", str(path / file), file)
