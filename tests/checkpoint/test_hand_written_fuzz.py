"""Any value of a tensor or of the manifest, with right checksums: an error, or a sound model."""

from __future__ import annotations

import copy
from pathlib import Path

import damage
import pytest
import torch
from hand_written import outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from whole_model import KINDS, save_trained

pytestmark = pytest.mark.cpu_only("is about files, which are read into memory of the CPU")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained(tmp_path_factory.mktemp("saved") / "last")


EXTREMES = [0, 1, -1, 2, 63, 64, 65, 200, -(2**63), 2**63 - 1, 2**31, 2**32, 2**62, 2**28, 2**35]


def check_changed_tensor(data: st.DataObject, saved: Path, path: Path) -> None:
    damage.copied(saved, path)
    file = data.draw(st.sampled_from(damage.files_of(saved)))
    whole = (torch.int64, torch.int32)
    names = [n for n, s in damage.tensors_of(saved / file).items() if s.dtype in whole and s.bytes]
    if not names:
        return
    name = data.draw(st.sampled_from(names))
    value = data.draw(st.sampled_from(EXTREMES))

    def change(values: Tensor) -> None:
        flat = values.view(-1)
        place = data.draw(st.integers(0, flat.numel() - 1))
        bits = 8 * values.element_size()
        other = int(flat[data.draw(st.integers(0, flat.numel() - 1))])
        new = data.draw(st.sampled_from([value, other, int(flat[place]) + 1, int(flat[place]) ^ 4]))
        flat[place] = (new + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))

    damage.change_tensor(path / file, name, change)
    damage.seal(path)
    outcome(path, data.draw(st.sampled_from(KINDS)), f"{file}, {name}, {value}")


FUZZ = settings(max_examples=60, suppress_health_check=list(HealthCheck))
LONG_FUZZ = settings(max_examples=1200, suppress_health_check=list(HealthCheck))


@pytest.mark.long
@FUZZ
@given(data=st.data())
def test_any_value_is_refused_or_sound(data: st.DataObject, saved: Path, tmp_path: Path) -> None:
    check_changed_tensor(data, saved, tmp_path / "last")


@pytest.mark.long
@LONG_FUZZ
@given(data=st.data())
def test_any_value_is_refused_or_sound_for_long(
    data: st.DataObject, saved: Path, tmp_path: Path
) -> None:
    check_changed_tensor(data, saved, tmp_path / "last")


VALUES = [None, True, -1, 0, 1, 2, 1 << 62, 1 << 64, 0.5, "", "x", [], {}, [0], [[0]], {"a": 1}]


def check_changed_manifest(data: st.DataObject, saved: Path, path: Path) -> None:
    damage.copied(saved, path)
    content = damage.read_manifest_text(path)
    places = list(damage.leaves_of(content))
    place = data.draw(st.sampled_from(places))
    others = [damage.value_at(content, other) for other in places[:: max(1, len(places) // 50)]]
    value = data.draw(st.sampled_from([*VALUES, *others]))
    damage.replaced(content, place, copy.deepcopy(value))
    damage.write_manifest(path, content)
    outcome(path, data.draw(st.sampled_from(KINDS)), f"{place}: {value!r}")


@pytest.mark.long
@FUZZ
@given(data=st.data())
def test_any_manifest_is_refused_or_sound(data: st.DataObject, saved: Path, tmp_path: Path) -> None:
    check_changed_manifest(data, saved, tmp_path / "last")


@pytest.mark.long
@LONG_FUZZ
@given(data=st.data())
def test_any_manifest_is_refused_or_sound_for_long(
    data: st.DataObject, saved: Path, tmp_path: Path
) -> None:
    check_changed_manifest(data, saved, tmp_path / "last")
