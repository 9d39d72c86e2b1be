"""Ways of saving a job and of loading it, and what numpy tables have after a load.

The files of a checkpoint are also read with the library safetensors.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fsspec
import numpy as np
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from covering import Case
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from trained_jobs import EVICTS, POLICIES, TYPES, Job
from trained_twin import FREQUENCIES, Floats, Twin

import torch_dynemb as td
from torch_dynemb import checkpoint, delta_log
from torch_dynemb.delta_log import DeltaLog

FILES = ("save", "asynchronous", "increment")  # they leave a whole checkpoint
LOGS = ("log", "resume")
OBJECTS = ("pickle", "deepcopy")  # the target is a copy of the source
STATES = ("state_dict", "dcp", *OBJECTS)


def take(case: Case, target: Job, saved: dict[str, Twin]) -> dict[str, dict[int, float]]:
    """Give the target's twins what was saved; return how far rows may be off."""
    slack: dict[str, dict[int, float]] = {}
    for name, twin in saved.items():
        own = target.twins[name]
        if case["save"] == "log":
            for id in _left_out(case, twin):
                twin.drop(id)
            if case["log_rows"]:
                slack[name] = {
                    id: _rounding(case["log_rows"], row) for id, row in twin.rows.items()
                }
        own.rows, own.scores, own.waiting = twin.rows, twin.scores, twin.waiting
        own.now, own.steps, own.initial = twin.now, twin.steps, twin.initial
        own.convert(own.dtype)
        if case["target_optimizer"] in ("same", "state_dtype"):
            own.take_state(twin)
        else:
            own.restart_optimizer(own.optimizer)
        if target.made.policy not in ("admission", "sketch"):
            own.waiting = {}
        if case["target_capacity"] == "smaller":
            keep_best(target, name, own)
    return slack


def keep_best(target: Job, name: str, twin: Twin) -> None:
    """Keep what a smaller table has, if these are ids with the highest scores."""
    word = EVICTS[target.made.policy]
    ids = {*target.ids(name).tolist()}
    gone = {*twin.rows} - ids
    parts = [part & {*twin.rows} for part in target.ids_by_part(name)]
    least = max((min(twin.scores[id][word] for id in part) for part in parts if part), default=0)
    if not gone or len(ids) >= target.made.capacity // 2:
        for id in gone:
            if twin.scores[id][word] <= least:
                twin.drop(id)


def _left_out(case: Case, twin: Twin) -> list[int]:
    """Return the ids that a log with ``keep`` leaves out."""
    of = {id: twin.scores[id]["frequency"] for id in twin.rows}
    if case["log_keep"] == "at_least":
        return [id for id, frequency in of.items() if frequency < 3]
    if case["log_keep"] == "top":
        return sorted(of, key=lambda id: (-of[id], id))[5:]
    return []


def _rounding(form: str, row: Floats) -> float:
    """Return how far a row in a form of a log may be off."""
    if form == "fp16":
        return float(np.abs(row).max() * 2**-11)
    return float((row.max() - row.min()) / 255 * 0.501)


class Place:
    """Where a program saves, and what else it saves there.

    Attributes:
        case: with axes ``save``, ``place`` and ``state``.
        folder: of the job.
        root: the same as a path or URL.
        path: of a checkpoint.
        state: of the program.
        base: of a log.
    """

    def __init__(self, case: Case, folder: str) -> None:
        self.case, self.how, self.folder = case, case["save"], folder
        roots = {"path": folder, "file": f"file://{folder}", "memory": f"memory:/{folder}"}
        self.root = roots[case["place"]]
        self.path = f"{self.root}/{'both' if self.how == 'increment' else 'last'}"
        self.state = (
            {"step": 1, "of": [torch.arange(3), ("a", None, 0.5)]} if case["state"] else None
        )
        self.base = "base"

    def load(self, target: Job) -> None:
        """Load into another model."""
        case, group, state = self.case, target.process_group(), self.state
        with_state = case["target_optimizer"] in ("same", "state_dtype")
        if self.how in FILES:
            state = checkpoint.load(
                self.path,
                target.model,
                process_group=group,
                optimizer_state=with_state,
                on_missing_state=case["on_missing_state"],
            ).state
        elif self.how == "log":  # which has no state of the program
            if case["followed"]:
                base = f"{self.root}/log/{self.base}"
                checkpoint.load(base, target.model, process_group=group, optimizer_state=with_state)
                delta_log.follow(f"{self.root}/log", target.model, base=base).update()
            else:
                delta_log.replay(f"{self.root}/log", target.model, process_group=group)
        elif self.how == "resume":
            state = delta_log.resume(f"{self.root}/log", target.model, process_group=group).state
        elif self.how == "snapshot":
            state = checkpoint.load_snapshot(target.model, process_group=group).state
        elif self.how == "state_dict":
            file = f"{self.folder}/state-{target.rank}"
            target.model.load_state_dict(torch.load(file, weights_only=True)["model"])
        elif self.how == "dcp":
            loaded = target.model.state_dict()
            dcp.load(
                loaded, checkpoint_id=self.path, process_group=group, planner=target.load_planner()
            )
            target.model.load_state_dict(loaded)
        assert str(state) == str(self.state), f"state= is {state}"


class Saving:
    """What a program does to save a job."""

    def __init__(self, place: Place, source: Job) -> None:
        self.place, self.case, self.how, self.source = place, place.case, place.how, source
        self.group = source.process_group()
        self.log: DeltaLog | None = None
        self._first = f"{place.root}/first"
        counts = POLICIES[self.case["policy"]].admission is not None  # of which a log has none
        self.resumes = self.how != "log" or (self.case["log_optimizer_state"] and not counts)

    def _save(self, path: str, **options: Any) -> checkpoint.SaveHandle:
        model = self.source.model
        wrapped = checkpoint_wrapper(model) if self.case["wrapped"] else model
        options |= {"keep_last": 1} if self.case["keep_last"] else {}
        return checkpoint.save(
            path, wrapped, process_group=self.group, state=self.place.state, **options
        )

    def begin(self) -> None:
        """Save, or begin to record, what will have changed at the end."""
        model, place = self.source.model, self.place
        if self.how == "increment":
            checkpoint.record_changes(model)
            self._save(self._first)
        elif self.how in LOGS:
            case = self.case
            keep = {
                None: None,
                "at_least": td.AtLeast(3, by="frequency"),
                "top": td.Top(5, by="frequency"),
            }[case["log_keep"]]
            names = [self.source.saved_name(name) for name in self.source.names]
            self.log = DeltaLog(
                f"{place.root}/log",
                optimizer_state=case["log_optimizer_state"],
                rows=case["log_rows"],
                keep=keep,
                tables=names if case["log_tables"] else None,
                retain=1 if case["log_retain"] else None,
                resume=self.how == "resume",
                process_group=self.group,
            )
            self.log.attach(model, state=place.state if self.how == "resume" else None)
        elif self.how in FILES:  # the last one replaces it
            self._save(self._first if self.case["keep_last"] else place.path)
        elif self.how == "snapshot":
            checkpoint.save_snapshot(model, "first", process_group=self.group)

    def end(self) -> None:
        """Save what there is now."""
        self._end()
        if self.case["keep_last"]:
            store, path = fsspec.core.url_to_fs(self._first)
            assert not store.exists(path), "the older checkpoint is still there"

    def _end(self) -> None:
        model, place = self.source.model, self.place
        if self.how == "asynchronous":
            handle = self._save(place.path, asynchronous=True)
            self.source.train(10)  # while a thread writes
            handle.wait()
        elif self.how == "save":
            self._save(place.path)
        elif self.how == "increment":
            self._save(f"{place.root}/second", since=self._first)
            if self.source.rank == 0 or not self.source.made.shared:
                checkpoint.merge(
                    [self._first, f"{place.root}/second"],
                    place.path,
                    parts=3 if self.case["merged_parts"] else None,
                )
        elif self.log is not None:
            given = {"state": place.state} if self.how == "resume" else {}
            self.log.publish(**given)
            if self.case["log_retain"]:
                place.base = f"base-{self.log.save(**given):020}"
            self.log.flush()
        elif self.how == "snapshot":
            checkpoint.save_snapshot(
                model, "second", state=place.state, keep_last=2, process_group=self.group
            )
        elif self.how == "state_dict":
            torch.save({"model": model.state_dict()}, f"{place.folder}/state-{self.source.rank}")
        elif self.how == "pickle":
            self._file = io.BytesIO(pickle.dumps(model))
        elif self.how == "deepcopy":
            self._copy = copy.deepcopy(model)
        elif self.how == "dcp":
            dcp.save(model.state_dict(), checkpoint_id=place.path, process_group=self.group)
        self.source.train(11)  # the source goes on

    def copied(self) -> Job:
        """Return a job with a copy of the source's model."""
        model = pickle.load(self._file) if self.how == "pickle" else self._copy
        target = copy.copy(self.source)
        target.take(model)
        target.twins = copy.deepcopy(self.source.twins)
        return target

    def close(self) -> None:
        """End the log."""
        if self.log is not None:
            self.log.close()


def wrong_files(path: str, source: Job, saved: Mapping[str, Twin]) -> list[str]:
    """Return what other libraries read of a checkpoint that differs from the twins."""
    files, root = fsspec.core.url_to_fs(path)
    manifest = json.loads(files.cat_file(f"{root}/manifest.json"))
    names = {source.saved_name(name): name for name in saved}
    if manifest["kind"] != "full" or {*manifest["tables"]} != {*names}:
        return [f"the manifest has {manifest['kind']} {[*manifest['tables']]}"]

    def read(file: Mapping[str, Any]) -> dict[str, Tensor]:
        return safetensors.torch.load(files.cat_file(f"{root}/{file['path']}"))

    found = []
    for of_table, name in names.items():
        twin, parts = saved[name], manifest["tables"][of_table]["parts"]
        rows = _rows_of(parts, read, TYPES[source.made.dtype])
        if {*rows} != {*twin.rows}:
            found.append(f"files of {name} have ids {sorted(rows)}")
            continue
        waiting: dict[int, int] = {}
        for counts in [read(part["counts"]) for part in parts if part.get("counts")]:
            waiting.update(zip(counts["id"].tolist(), counts["count"].tolist(), strict=True))
        if source.made.policy == "admission" and waiting != twin.waiting:
            found.append(f"files of {name} have counts {waiting}, expected {twin.waiting}")
        for id, values in rows.items():
            expected = {"weight": twin.rows[id]}
            names_of_state = [of.name for of in twin.optimizer.state]
            expected |= zip(
                [f"state.{of}" for of in names_of_state], twin.state.get(id, ()), strict=False
            )
            for word in POLICIES[source.made.policy].scores:
                if word in FREQUENCIES:
                    expected[f"score.{word}"] = np.array(twin.scores[id][word])
            for of, value in expected.items():
                if of not in values or not np.allclose(
                    values[of], value, rtol=source.tolerance(), atol=source.tolerance()
                ):
                    found.append(f"files of {name} have {of} {values.get(of)} of {id}: {value}")
    return found[:3]


def _rows_of(
    parts: Sequence[Mapping[str, Any]],
    read: Callable[[Mapping[str, Any]], dict[str, Tensor]],
    dtype: torch.dtype,
) -> dict[int, dict[str, Floats]]:
    """Return what files have of each id: columns of parts beside each other."""
    by_ids: dict[int, list[dict[str, Floats]]] = {}
    for part in sorted(parts, key=lambda of: int(of["first_column"])):
        tensors = [read(file) for file in part["rows"]]
        assert all(of["weight"].dtype == dtype for of in tensors)
        joined = {of: torch.cat([one[of] for one in tensors]) for of in (tensors or [{}])[0]}
        values = {of: value.numpy() for of, value in joined.items() if of == "id"}
        values |= {of: value.double().numpy() for of, value in joined.items() if of != "id"}
        by_ids.setdefault(part["slots_begin"], []).append(values)
    found = {}
    for first, *others in by_ids.values():
        for n, id in enumerate(first.get("id", ())):
            pieces = [{of: np.atleast_1d(value[n]) for of, value in first.items()}]
            pieces += [{of: np.atleast_1d(value[n]) for of, value in v.items()} for v in others]
            found[int(id)] = {
                of: np.concatenate([piece[of] for piece in pieces if of in piece])
                for of in pieces[0]
            }
    return found
