"""Saved tables of all kinds, loaded elsewhere, against numpy tables that train beside them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec
import torch
import torch.distributed as dist
from covering import Case, Space
from saving_ways import FILES, LOGS, OBJECTS, STATES, Place, Saving, take, wrong_files
from torch.distributed.checkpoint.api import CheckpointException
from trained_jobs import (
    CAPACITIES,
    EVICTS,
    NEW,
    OPTIMIZERS,
    POLICIES,
    STEPS,
    TYPES,
    Job,
    source_of,
    target_of,
)

import torch_dynemb as td
from torch_dynemb import checkpoint, delta_log
from torch_dynemb.delta_log import DeltaLog


def check(rank: int, case: Case) -> list[str]:
    """Return where what was loaded differs from numpy; collective."""
    return check_as_given(rank, meant(case))


def check_as_given(rank: int, case: Case) -> list[str]:
    """Do so with combinations that are refused, too."""
    with TemporaryDirectory() as folder:
        of_first = [folder]
        dist.broadcast_object_list(of_first)
        try:
            found = _differences(rank, case, of_first[0])
        except CheckpointException as error:  # of a kind that programs do not catch
            raise RuntimeError(str(error)) from None
        finally:
            fsspec.filesystem("memory").store.clear()
        dist.barrier()  # before the folder goes
        return found


def meant(case: Case) -> Case:
    """Return a case without the values that its other values ignore or refuse."""
    case = dict(case)
    for said, names in WITHOUT:
        if said(case):
            case |= {name: SPACE.axes[name][0] for name in names}
    return case


def _differences(rank: int, case: Case, folder: str) -> list[str]:
    made = source_of(case)
    own = folder if made.shared else f"{folder}/of-{rank}"
    Path(own).mkdir(exist_ok=True)
    source = Job(case, made, f"{own}/source")
    place = Place(case, own)
    saving = Saving(place, source)
    for step in range(STEPS):
        source.train(step)
    saving.begin()
    source.change(case["changes"])
    source.train(STEPS)
    saved = copy.deepcopy(source.twins)
    saving.end()
    found = source.differences("the source")
    if case["save"] in FILES:
        found += wrong_files(place.path, source, saved)
    if case["save"] in OBJECTS:
        target = saving.copied()
    elif case["save"] == "snapshot":
        source.end()  # one model has the store
        target = Job(case, target_of(case), f"{own}/source", seed=1)
    else:
        target = Job(case, target_of(case), f"{folder}/target-{rank}", seed=1)
    if case["target_is"] == "used":
        target.train(20, NEW)
    dist.barrier()
    if case["save"] not in OBJECTS:
        first = target.made.shared and not made.shared  # one of several
        there = Place(case, f"{folder}/of-0" if first else own)
        there.base = place.base
        there.load(target)
    if not torch.equal(target.model["dense"].bias, torch.full((1,), 3.0)):
        found.append("the dense state")
    slack = take(case, target, saved)
    found += target.differences("loaded", slack)
    if target.made.optimizer != "none" and not slack and saving.resumes:
        for step in range(STEPS + 1, 2 * STEPS + 1):
            target.train(step)
        found += target.differences("trained on")
    saving.close()
    return found


TABLES = ("target_dtype", "target_policy", "target_optimizer")
LOG = ("log_optimizer_state", "log_rows", "log_keep", "log_tables", "followed")
WITHOUT: list[tuple[Callable[[Case], bool], Sequence[str]]] = [  # when -> axes that are plain then
    # ignored
    (lambda c: c["save"] not in FILES, ["wrapped", "on_missing_state"]),
    (lambda c: c["save"] not in (*FILES, *LOGS), ["place"]),
    (lambda c: c["place"] == "memory" and c["ranks"] > 1, ["place"]),  # of one process
    (lambda c: c["save"] not in (*FILES, "resume", "snapshot"), ["state"]),
    (lambda c: c["save"] != "increment", ["merged_parts"]),
    (lambda c: c["save"] not in ("save", "asynchronous"), ["keep_last"]),
    (lambda c: c["save"] not in LOGS, ["log_retain"]),
    (lambda c: c["save"] != "log", LOG),
    (lambda c: c["policy"] != "lfu", ["log_keep"]),
    (lambda c: c["policy"] not in EVICTS or c["target_policy"] == "other", ["target_capacity"]),
    (
        lambda c: (
            c["target_optimizer"] == "state_dtype" and c["optimizer"] not in ("adam", "adam_bf16")
        ),
        ["target_optimizer"],
    ),
    (lambda c: c["target_optimizer"] == "none", ["target_is"]),  # it cannot be trained before
    (lambda c: c["save"] in (*OBJECTS, "snapshot"), ["target_split", "target_is"]),
    (lambda c: c["save"] == "log" and c["policy"] == "ttl", ["policy"]),  # a log has no times
    (
        lambda c: c["target_capacity"] == "smaller" and c["target"] == "shared",
        ["target_capacity"],  # each rank evicts the worst of its own
    ),
    # refused: see REFUSED
    (lambda c: c["save"] in ("increment", *LOGS, *STATES), ["storage"]),
    (lambda c: c["save"] in (*STATES, "snapshot"), [*TABLES, "target_ssd", "target_capacity"]),
    (lambda c: c["save"] == "resume", TABLES),
    (lambda c: c["save"] == "log" and c["target_capacity"] == "smaller", ["target_capacity"]),
    (
        lambda c: c["save"] == "log" and (c["log_optimizer_state"] or not c["followed"]),
        ["target_optimizer"],
    ),
    (lambda c: c["target_policy"] == "other", ["on_missing_state"]),
    (lambda c: c["policy"] == "custom", ["source", "target"]),
]
REFUSED = {  # as the pages say
    "save=increment storage=ssd": "save_snapshot, which writes changed rows only",
    "save=log storage=ssd": "save_snapshot, which writes changed rows only",
    "save=resume storage=ssd": "call torch_dynemb.checkpoint.save_snapshot",
    "save=state_dict storage=ssd": "save the model with torch_dynemb.checkpoint.save",
    "save=deepcopy storage=ssd": "save the model with torch_dynemb.checkpoint.save",
    "save=snapshot": "no table of the model has storage=SSDStore",
    "save=snapshot storage=ssd target_dtype=other": "Give the tables another path",
    "save=snapshot storage=ssd target_policy=other": "tables as they were when it was saved",
    "save=snapshot storage=ssd target_optimizer=other": "Give the tables another path",
    "save=state_dict target_dtype=other": "construct it as it was when it was saved",
    "save=state_dict target_policy=other": "construct it as it was when it was saved",
    "save=state_dict target_optimizer=other": "construct it as it was when it was saved",
    "save=state_dict policy=lru target_capacity=smaller": "construct it with a larger",
    "save=dcp target_optimizer=other": "Missing key in checkpoint",
    "save=resume target_dtype=other": "give the model that was published",
    "save=resume target_policy=other": "give the model that was published",
    "save=resume target_optimizer=other": "give the model that was published",
    "save=log target_optimizer=other": "give optimizer_state=False to load the rows alone",
    "save=log policy=lru target_capacity=smaller": "give it the capacity of the table",
    "target_policy=other on_missing_state=error": "give on_missing_state='fresh'",
    "policy=custom source=shared": "leave that score or process_group out",
}


SPACE = Space(
    "saving",
    axes={
        "ranks": [1, 2],
        "save": [*FILES, *LOGS, "snapshot", *STATES],
        "kind": ["embedding", "bag", "bags", "sequences"],
        "optimizer": list(OPTIMIZERS),
        "dtype": list(TYPES),
        "split": [False, True],
        "policy": list(POLICIES),
        "storage": ["none", "ssd"],
        "initializer": ["constant", "default"],
        "padding_idx": [False, True],
        "memory": ["default", "max_rows", "budget"],
        "named": [False, True],
        "changes": ["none", "erase", "clear", "write", "forget", "compact", "grow"],
        "source": ["alone", "shared"],
        "target": ["alone", "shared"],
        "target_is": ["new", "used"],
        "target_dtype": ["same", "other"],
        "target_policy": ["same", "other"],
        "target_capacity": list(CAPACITIES),
        "target_ssd": ["same", "other"],
        "target_split": ["same", "other"],
        "target_optimizer": ["same", "other", "state_dtype", "none"],
        "place": ["path", "file", "memory"],
        "wrapped": [False, True],
        "state": [False, True],
        "on_missing_state": ["fresh", "error"],
        "merged_parts": [False, True],
        "keep_last": [False, True],
        "log_optimizer_state": [False, True],
        "log_rows": [None, "int8", "fp16"],
        "log_keep": [None, "at_least", "top"],
        "log_tables": [False, True],
        "log_retain": [False, True],
        "followed": [False, True],
    },
    constraints=[
        # files of one rank are not those of others
        lambda ranks, save, source, target: (
            ranks == 1 or save not in (*STATES, "snapshot") or source == target
        ),
        lambda ranks, save, target: ranks == 1 or save != "log" or target == "shared",
        lambda ranks, save, policy: ranks == 1 or save != "log" or policy != "custom",  # not shared
        lambda save, storage: save != "snapshot" or storage == "ssd",
    ],
    check=check,
    public=[
        checkpoint.save,
        checkpoint.load,
        checkpoint.merge,
        checkpoint.record_changes,
        checkpoint.save_snapshot,
        checkpoint.load_snapshot,
        delta_log.replay,
        delta_log.follow,
        delta_log.resume,
        DeltaLog,
        td.SingleTableOptions,
    ],
    without_axis={
        **dict.fromkeys(("path", "paths", "out", "since", "log", "base"), "axes save and place"),
        "model": "axis kind",
        "process_group": "axes source and target",
        "asynchronous": "axis save",
        "resume": "axis save",
        "progress": "shows a bar: test_inspection.py",
        "strict": "is about other tables: test_checkpoints.py",
        "optimizer_state": "axes target_optimizer and log_optimizer_state",
        "parts": "axis merged_parts",
        "rows": "axis log_rows",
        "keep": "axis log_keep",
        "tables": "axis log_tables",
        "retain": "axis log_retain",
        "sequence": "begins at a commit: test_following_live.py",
        "until": "ends at a commit: test_delta_log.py",
        "dense": "keeps the dense state: test_delta_log.py",
        "every_steps": "says when to publish: test_delta_log_publishing.py",
        "every_seconds": "says when to publish: test_delta_log_publishing.py",
        "name": "axis named",
        "max_rows": "axis memory",
        "memory_budget": "axis memory",
        "trainable": "axis target_optimizer",
        "eval_default": "is not saved: modules_space.py",
        "output_dtype": "is not saved: modules_space.py",
        "device": "loads between devices: test_checkpoints.py",
    },
)
