"""What two ranks do in test_lost_answers.py: saves of which one call of one rank goes wrong."""

from __future__ import annotations

import gc
import shutil
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist
from interrupting import ctrl_c_raises
from killed_ranks import TIMEOUT_S, Sharded
from lost_answers import HOWS, Dead, Faults, Store, age, url_of, with_faults

from torch_dynemb import checkpoint


def walk(rank: int, folder: str) -> None:
    """Walk over calls of both ranks; see :class:`test_lost_answers.Walk`."""
    models = [Sharded(rank).train_to(epoch) for epoch in range(2)]
    contents = [model.content() for model in models]
    template, place = Path(folder) / "template", Path(folder) / "place"

    def found() -> int:
        model = Sharded(rank)
        checkpoint.load(url_of(Store, place / "last"), model)
        own, epoch = model.content(), int(model.dense.weight[0, 0])
        assert all((own[name] == contents[epoch][name]).all() for name in own)
        return epoch

    def laid() -> None:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(template, place)
        dist.barrier()

    checkpoint.save(url_of(Store, template / "last"), models[0])
    laid()
    counted = Faults()
    url = url_of(Store, place / "last")
    assert with_faults(counted, (), lambda: checkpoint.save(url, models[1])) is None
    of_ranks: list[list[str]] = [[], []]
    dist.all_gather_object(of_ranks, counted.seen)
    points = [
        (victim, at, how)
        for victim, calls in enumerate(of_ranks)
        for at in range(1, len(calls) + 1)
        for how in HOWS
    ]
    for victim, at, how in points:
        laid()
        group = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT_S))
        job = partial(checkpoint.save, url, models[1], process_group=group)
        faults = Faults(at if rank == victim else 0, how)
        with ctrl_c_raises():
            error = with_faults(faults, (), job)
        if error in (Dead, KeyboardInterrupt):
            gc.collect()  # frames of errors have the group
        dist.destroy_process_group(group)  # closes its connections, as the end of a process does
        del group, job
        dist.barrier()
        assert found() in ((1,) if error is None else (0, 1)), (victim, at, how)
        age(place)
        dist.barrier()
        checkpoint.save(url, models[1])
        assert found() == 1
        assert len(list((place / "last").iterdir())) == 2
