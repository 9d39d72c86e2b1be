"""Each call of a save goes wrong in turn, also after it took effect: a checkpoint is left."""

from __future__ import annotations

import gc
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import lost_by_ranks
import pytest
import torch
from interrupting import ctrl_c_raises
from lost_answers import HOWS, Dead, Drafts, Faults, Store, age, url_of, with_faults
from ranks import Ranks
from test_accelerate_hooks import Accelerator
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import checkpoint, errors
from torch_dynemb.checkpoint.saving import handle
from torch_dynemb.files import presence, uploads
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import checked_location

pytestmark = pytest.mark.cpu_only("is about files, which know no device")

SAVE = sys.modules["torch_dynemb.checkpoint.saving.save"]
SNAPSHOTS = sys.modules["torch_dynemb.checkpoint.snapshots.save"]
IDS = torch.arange(30)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Some files of a few bytes are uploaded in parts."""
    monkeypatch.setattr(uploads, "PART_BYTES", 6000)
    with ctrl_c_raises():
        yield


def new_model(storage: Any = None) -> nn.ModuleDict:
    torch.manual_seed(0)
    ads = td.DynamicEmbedding(2, name="ads", optimizer=td.SGD(lr=0.1), max_rows=64, storage=storage)
    return nn.ModuleDict({"ads": ads, "top": nn.Linear(2, 1)})


def train(model: nn.ModuleDict, epoch: int) -> nn.ModuleDict:
    """Trains an epoch, 1 or 2: ids, rows and dense state are others in each."""
    model["ads"](IDS[: 10 * epoch]).sum().backward()
    model["ads"].optimizer.step()
    with torch.no_grad():
        model["top"].weight.fill_(epoch)
    return model


@cache
def model_of(epoch: int) -> nn.ModuleDict:
    model = new_model()
    for number in range(1, epoch + 1):
        train(model, number)
    return model


def content(model: nn.ModuleDict) -> Tensor:
    known = torch.tensor([[int(id_) in model["ads"]] for id_ in IDS])
    with torch.no_grad():
        return torch.cat([known, model["ads"](IDS), model["top"].weight.expand(len(IDS), 2)], 1)


@cache
def content_of(epoch: int) -> Tensor:
    return content(model_of(epoch))


def epoch_at(path: Any) -> int:
    """The epoch of the checkpoint at a place, of which everything is checked."""
    model = model_of(0)
    checkpoint.load(path, model)
    return epoch_of(model)


def epoch_of(model: nn.ModuleDict) -> int:
    epoch = int(model["top"].weight[0, 0])
    assert torch.equal(content(model), content_of(epoch))
    return epoch


class Walk(NamedTuple):
    """A job of which each call goes wrong in turn.

    Attributes:
        job: saves an epoch in a folder.
        epoch: checks what is in a folder, and returns its epoch.
        only: checks that nothing else is in it.
        modules: those with the local disk of the job.
        naming: calls of the kind that makes the new epoch exist; the last one does.
    """

    job: Callable[[Path, int], object]
    epoch: Callable[[Path], int]
    only: Callable[[Path], None]
    modules: tuple[Any, ...] = ()
    naming: tuple[str, ...] = ("pipe_file", "mv")

    def run(self, folder: Path, every: int = 1) -> None:
        """Walk.

        Args:
            folder: to work in.
            every: of so many pairs of a call and a way to go wrong, one is tried, beside those of
                the call that makes the new epoch exist.
        """
        template, place = folder / "template", folder / "place"
        self.job(template, 1)
        shutil.copytree(template, place)
        counted = Faults()
        assert with_faults(counted, self.modules, lambda: self.job(place, 2)) is None
        shutil.rmtree(place)
        calls = counted.seen
        named = [at for at, call in enumerate(calls, 1) if call in self.naming][-1]
        points = [(at, how) for at in range(1, len(calls) + 1) for how in HOWS]
        for number, (at, how) in enumerate(points):
            if number % every == 0 or at == named:
                shutil.copytree(template, place)
                try:
                    self.goes_wrong(place, Faults(at, how))
                except Exception as error:
                    raise AssertionError(f"call {at} of {calls} {how}") from error
                shutil.rmtree(place)

    def goes_wrong(self, place: Path, faults: Faults) -> None:
        error = with_faults(faults, self.modules, lambda: self.job(place, 2))
        assert error is None or issubclass(error, OSError | KeyboardInterrupt | Dead)
        assert self.epoch(place) in ((2,) if error is None else (1, 2))
        age(place)
        self.job(place, 2)
        assert self.epoch(place) == 2
        self.only(place)


def walks(every: int, *values: Any) -> list[Any]:
    """A thin walk in the first case, and whole ones in all."""
    whole = [pytest.param(*case, 1, marks=pytest.mark.long) for case in values]
    return [pytest.param(*values[0], every), *whole]


# -- checkpoints -----------------------------------------------------------------------------------


def saved(path: Any, epoch: int, asynchronous: bool = False) -> None:
    try:
        checkpoint.save(path, model_of(epoch), asynchronous=asynchronous).wait()
    except KeyboardInterrupt:
        if handle._last is not None:
            handle._last.wait()  # it goes on
        raise


def only_one_at_url(place: Path) -> None:
    uuid = json.loads((place / "last" / "manifest.json").read_bytes())["uuid"]
    assert {path.name for path in (place / "last").iterdir()} == {"manifest.json", uuid}


@pytest.mark.parametrize(
    ("kind", "asynchronous", "every"),
    walks(7, (Store, False), (Store, True), (Drafts, False), (Drafts, True)),
)
def test_checkpoints_at_urls(
    kind: type[Store], asynchronous: bool, every: int, tmp_path: Path
) -> None:
    Walk(
        lambda place, epoch: saved(url_of(kind, place / "last"), epoch, asynchronous),
        lambda place: epoch_at(url_of(kind, place / "last")),
        only_one_at_url,
    ).run(tmp_path, every)


def only_one_of(place: Path, name: str) -> None:
    assert [path.name for path in place.iterdir()] == [name]


@pytest.mark.parametrize(("asynchronous", "every"), walks(17, (False,), (True,)))
def test_checkpoints_on_disks(asynchronous: bool, every: int, tmp_path: Path) -> None:
    def job(place: Path, epoch: int) -> None:
        saved(place / "last", epoch, asynchronous)
        if epoch == 1:
            (place / "last" / "notes.txt").write_text("of the user")

    def only(place: Path) -> None:
        only_one_of(place, "last")
        assert (place / "last" / "notes.txt").read_text() == "of the user"

    Walk(job, lambda place: epoch_at(place / "last"), only, (SAVE,), ("rename",)).run(
        tmp_path, every
    )


@pytest.mark.long
def test_checkpoints_of_accelerate(tmp_path: Path) -> None:
    def save_state(place: Path, epoch: int) -> None:
        accelerator = Accelerator("NO", model_of(epoch))
        checkpoint.save_with(accelerator)
        accelerator.save(accelerator.models, [{}], str(place))

    Walk(
        save_state,
        lambda place: epoch_at(place / "torch_dynemb_0"),
        lambda place: only_one_of(place, "torch_dynemb_0"),
        (SAVE,),
        ("rename",),
    ).run(tmp_path, 1)


def removed(place: Path, epoch: int) -> None:
    """Saves a checkpoint, and removes it as a log does with its bases: that is epoch 2."""
    url = url_of(Store, place / "last")
    if epoch == 1:
        saved(url, 1)
        return
    location = checked_location("test", url)
    uploads.disk_of(location, Disk()).remove(location)
    if presence.is_there(location):
        raise OSError("it is there")


def removed_or_whole(place: Path) -> int:
    try:
        return epoch_at(url_of(Store, place / "last"))
    except FileNotFoundError:
        return 2


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.long)])
def test_removals_at_urls(every: int, tmp_path: Path) -> None:
    def nothing(place: Path) -> None:
        assert not (place / "last").exists()

    Walk(removed, removed_or_whole, nothing, (), ("rm_file",)).run(tmp_path, every)


# -- snapshots -------------------------------------------------------------------------------------


def stored_model(place: Path) -> nn.ModuleDict:
    storage = td.SSDStore(place / "rows", cache="64 rows", segment="64KiB")
    try:
        return new_model(storage)
    except errors.InUseError:
        gc.collect()  # frames of errors have the model before
    return new_model(storage)


def save_snapshot(place: Path, epoch: int) -> None:
    model = stored_model(place)
    if epoch == 2:
        checkpoint.load_snapshot(model)
    if epoch == 1 or epoch_of(model) == 1:
        train(model, epoch)
    checkpoint.save_snapshot(model, "a")


def snapshot_epoch(place: Path) -> int:
    model = stored_model(place)
    checkpoint.load_snapshot(model)
    return epoch_of(model)


def only_one_snapshot(place: Path) -> None:
    assert checkpoint.snapshots(place / "rows") == ["a"]
    assert len(list((place / "rows" / "index").iterdir())) == 1
    assert len(list((place / "rows" / "snapshots").iterdir())) == 1


@pytest.mark.long
def test_snapshots(tmp_path: Path) -> None:
    Walk(
        save_snapshot,
        snapshot_epoch,
        only_one_snapshot,
        (SAVE, SNAPSHOTS),
        ("rename",),
    ).run(tmp_path)


# -- two ranks -------------------------------------------------------------------------------------


@pytest.mark.long
def test_checkpoints_of_two_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(lost_by_ranks.walk, str(tmp_path))
