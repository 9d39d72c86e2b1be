"""Trains until one rank dies."""

from __future__ import annotations

import os

from jagged_batches import batches_of_ranks, keyed_jagged
from sharded_models import Table, sharded


def dies_in_the_second_step(rank: int) -> None:
    model = sharded([Table("users", 8, ("user",))])
    for step in range(2):
        batch = batches_of_ranks("plain", ["user"], 2, step)[rank]
        output = model(keyed_jagged(batch, "plain"))["user"]
        if step == 1 and rank == 1:
            os._exit(1)
        output.sum().backward()
        # what the next rank would wait for
        model(keyed_jagged(batch, "plain"))["user"].sum().backward()
