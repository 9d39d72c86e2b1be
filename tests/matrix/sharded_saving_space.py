"""Sharded models, saved in all ways, and loaded into other shards on other ranks, against numpy."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from covering import Case, Space
from saving_ways import FILES, LOGS, Place, Saving, keep_best, take, wrong_files
from sharded_jobs import ShardedJob, pooling_of, sharded_source, sharded_target
from sharded_models import BAG_SHARDINGS
from torch.distributed.checkpoint.api import CheckpointException
from trained_jobs import CAPACITIES, EVICTS, NEW, OPTIMIZERS, POLICIES, STEPS, TYPES

from torch_dynemb.torchrec import reshard

STATES = ("state_dict", "dcp")
gc.freeze()  # else each collection looks at all of torch
UNCHANGED = ("snapshot", "reshard")  # ways that keep all options


def save(rank: int, case: Case) -> list[str]:
    """Train and save; return where the source differs from numpy; collective."""
    return save_as_given(rank, meant(case))


def save_as_given(rank: int, case: Case) -> list[str]:
    """Do so with combinations that are refused, too."""
    case, folder = {**PLAIN, **case}, case["folder"]
    if case["save"] == "reshard":
        return []  # of a running job
    source = ShardedJob(case, sharded_source(case), f"{folder}/rows")
    place = Place(case, folder)
    saving = Saving(place, source)
    for step in range(STEPS):
        source.train(step)
    if source.saves:
        saving.begin()
    source.change(case["changes"])
    source.train(STEPS)
    saved = copy.deepcopy(source.twins)
    static = source.static() if case["static"] else None
    if source.saves:
        saving.end()
    else:
        for step in (10, 11) if case["save"] == "asynchronous" else (11,):
            source.train(step)
    found = source.differences("the source")
    if case["save"] in FILES:
        dist.barrier()
        found += wrong_files(place.path, source, saved)
    saving.close()
    if rank == 0:
        with Path(folder, "twins").open("wb") as file:
            pickle.dump((saved, place.base, saving.resumes, static), file)
    dist.barrier()
    _end(case, source)
    return found


def load(rank: int, case: Case) -> list[str]:
    """Load, and train on; return where the target differs from numpy; collective."""
    return load_as_given(rank, meant(case))


def load_as_given(rank: int, case: Case) -> list[str]:
    """Do so with combinations that are refused, too."""
    case, folder = {**PLAIN, **case}, case["folder"]
    if case["save"] == "reshard":
        return _resharded(case, folder)
    with Path(folder, "twins").open("rb") as file:
        saved, base, resumes, static = pickle.load(file)
    store = "rows" if case["save"] == "snapshot" else "other-rows"
    target = ShardedJob(case, sharded_target(case), f"{folder}/{store}", seed=1)
    if case["target_is"] == "used":
        target.train(20, NEW)
    place = Place(case, folder)
    place.base = base
    try:
        place.load(target)
    except CheckpointException as error:  # of a kind that programs do not catch
        raise RuntimeError(str(error)) from None
    found = [] if target.dense() == 3 else ["the dense state"]
    if static is not None and not torch.equal(target.static(), static):
        found.append(f"the static table has {target.static()}, expected {static}")
    begin = {name: twin.initial for name, twin in target.twins.items()}
    slack = take(case, target, saved)
    if case["save"] in STATES:  # which have neither seeds nor sketches
        for name, twin in target.twins.items():
            twin.initial = begin[name]
            if case["policy"] == "sketch":
                twin.waiting = {}
    target.compares_state = case["save"] != "log" or case["log_optimizer_state"]
    target.compares_scores = case["target_policy"] == "same" and case["save"] != "log"
    found += target.differences("loaded", slack)
    if target.made.optimizer != "none" and resumes and not found:
        found += _trained_on(target)
    _end(case, target)
    return found


def _resharded(case: Case, folder: str) -> list[str]:
    job = ShardedJob(case, sharded_source(case), f"{folder}/rows")
    for step in range(STEPS):
        job.train(step)
    job.change(case["changes"])
    job.reshard(sharded_target(case))
    for name, twin in job.twins.items() if case["policy"] in EVICTS else ():
        keep_best(job, name, twin)  # parts have more or fewer ids
    found = job.differences("moved") or _trained_on(job)
    _end(case, job)
    return found


def _trained_on(job: ShardedJob) -> list[str]:
    for step in range(STEPS + 1, 2 * STEPS + 1):
        job.train(step)
    return job.differences("trained on")


def _end(case: Case, job: ShardedJob) -> None:
    job.end()
    if case["storage"] == "ssd" or case["target_ssd"] == "other":
        gc.collect()  # a store is open until then


def meant(case: Case) -> Case:
    """Return a case without the values that its other values ignore or refuse."""
    case = dict(case)
    for said, names in WITHOUT:
        if said(case):
            case |= {name: SPACE.axes[name][0] for name in names}
    return case


def _replicated(case: Case) -> bool:
    return "replicas" in (case["source"], case["target"])


def _splits_columns(case: Case) -> bool:
    made = sharded_source(case)
    of = [made.sharding_of(name, pooling_of(case["kind"], name)) for name in "tu"]
    return max(made.shards(sharding)[1] for sharding in of) > 1


TABLES = ("target_dtype", "target_policy", "target_optimizer")
PLAIN = {  # axes of the ways of saving that unsharded tables have
    "place": "path",
    "wrapped": False,
    "log_rows": None,
    "log_keep": None,
    "log_tables": False,
    "log_retain": False,
}
WITHOUT: list[tuple[Callable[[Case], bool], Sequence[str]]] = [  # when -> axes that are plain then
    # ignored
    (lambda c: c["save"] not in FILES, ["on_missing_state"]),
    (lambda c: c["save"] not in (*FILES, "resume", "snapshot"), ["state"]),
    (lambda c: c["save"] != "increment", ["merged_parts"]),
    (lambda c: c["save"] not in ("save", "asynchronous"), ["keep_last"]),
    (lambda c: c["save"] != "log", ["log_optimizer_state", "followed"]),
    (_splits_columns, ["log_optimizer_state"]),
    (
        lambda c: (
            c["target_optimizer"] == "state_dtype" and c["optimizer"] not in ("adam", "adam_bf16")
        ),
        ["target_optimizer"],
    ),
    (lambda c: c["policy"] not in EVICTS or c["target_policy"] == "other", ["target_capacity"]),
    (lambda c: c["target_optimizer"] == "none", ["target_is"]),  # it cannot be trained before
    (lambda c: c["save"] in UNCHANGED, ["target_split", "target_is"]),
    (lambda c: c["save"] == "reshard", ["storage"]),
    (lambda c: c["save"] == "log" and c["policy"] == "ttl", ["policy"]),  # a log has no times
    # refused: see REFUSED
    (lambda c: c["save"] in ("increment", *LOGS, *STATES), ["storage"]),
    (lambda c: c["save"] in UNCHANGED, [*TABLES, "target_ssd"]),
    (lambda c: c["save"] in STATES, ["target_optimizer", "target_ssd"]),
    (lambda c: c["save"] == "dcp", ["target_policy"]),
    (lambda c: c["save"] in UNCHANGED, ["target_capacity"]),
    (lambda c: c["save"] == "resume", TABLES),
    (
        lambda c: c["save"] in ("log", *STATES) and c["target_capacity"] == "smaller",
        ["target_capacity"],
    ),
    (
        lambda c: c["save"] == "log" and (c["log_optimizer_state"] or not c["followed"]),
        ["target_optimizer"],
    ),
    (lambda c: c["target_policy"] == "other", ["on_missing_state"]),
    (_replicated, ["storage", "target_ssd"]),
    (lambda c: _replicated(c) and c["policy"] in ("admission", "sketch"), ["policy"]),
    # unsharded models lack TorchRec's own tables, which torch.save does not make plain
    (lambda c: "td" in (c["source"], c["target"]) or c["save"] == "state_dict", ["static"]),
    (lambda c: c["save"] in (*LOGS, "reshard"), ["static"]),
    (lambda c: c["policy"] == "custom", ["static"]),
]
REFUSED = {  # as the pages say
    "save=log static=True": "are not whole tensors, which a delta log requires",
    "ranks=2 save=log sharding=column_wise log_optimizer_state=True": "which splits their state",
    "save=increment storage=ssd": "save_snapshot, which writes changed rows only",
    "save=log storage=ssd": "save_snapshot, which writes changed rows only",
    "save=state_dict storage=ssd": "save the model with torch_dynemb.checkpoint.save",
    "save=state_dict target_optimizer=other": "loads rows without optimizer state",
    "save=state_dict policy=lru target_capacity=smaller": "give it a larger capacity",
    "save=dcp target_optimizer=other": "Missing key in checkpoint",
    "save=dcp policy=lru target_policy=other": "loads rows without optimizer state, scores",
    "save=resume target_optimizer=other": "give the model that was published",
    "save=snapshot storage=ssd target_policy=other": "which other tables can load",
    "target_ranks=2 save=snapshot storage=ssd": "has no snapshot",
    "save=reshard static=True target_sharding=row_wise": "it cannot move",
    "ranks=2 source=replicas policy=sketch": "choose AdmitFrequent",
    "ranks=2 source=replicas storage=ssd": "which does not record which rows change",
    "ranks=2 source=td policy=custom": "leave that score or process_group out",
}


SPACE = Space(
    "sharded_saving",
    axes={
        "ranks": [1, 2, 4],
        "target_ranks": [1, 2, 4],
        "save": [*FILES, *LOGS, "snapshot", "reshard", *STATES],
        "source": ["sharded", "td", "replicas"],
        "target": ["sharded", "td", "replicas"],
        "sharding": BAG_SHARDINGS,
        "target_sharding": BAG_SHARDINGS,
        "kind": ["bags", "sequences", "both"],
        "optimizer": list(OPTIMIZERS),
        "dtype": list(TYPES),
        "split": [False, True],
        "policy": list(POLICIES),
        "storage": ["none", "ssd"],
        "initializer": ["constant", "default"],
        "padding_idx": [False, True],
        "static": [False, True],
        "changes": ["none", "grow"],
        "target_is": ["new", "used"],
        "target_dtype": ["same", "other"],
        "target_policy": ["same", "other"],
        "target_capacity": list(CAPACITIES),
        "target_ssd": ["same", "other"],
        "target_split": ["same", "other"],
        "target_optimizer": ["same", "other", "state_dtype", "none"],
        "state": [False, True],
        "on_missing_state": ["fresh", "error"],
        "merged_parts": [False, True],
        "keep_last": [False, True],
        "log_optimizer_state": [False, True],
        "followed": [False, True],
    },
    constraints=[
        # groups of ranks
        lambda ranks, source: source != "replicas" or ranks > 1,
        lambda target_ranks, target: target != "replicas" or target_ranks > 1,
        # refused, or of one form alone
        lambda save, source, target: (
            save not in STATES or (source, target) == ("sharded", "sharded")
        ),
        lambda save, ranks, target_ranks: save != "state_dict" or ranks == target_ranks,
        lambda save, source, target, ranks, target_ranks: (
            save not in UNCHANGED or (source == target != "replicas" and ranks == target_ranks)
        ),
        lambda save, sharding, target_sharding: save != "snapshot" or sharding == target_sharding,
        lambda save, source: save != "reshard" or source == "sharded",
        lambda save, storage: save != "snapshot" or storage == "ssd",
        lambda policy, source, ranks: policy != "custom" or source != "td" or ranks == 1,
        lambda policy, target, target_ranks: (
            policy != "custom" or target != "td" or target_ranks == 1
        ),
    ],
    check=save,
    then=load,
    public=[reshard],
    without_axis={
        "model": "axis source",
        "plan": "axis target_sharding",
    },
)
