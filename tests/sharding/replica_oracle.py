"""What a sync of sharding groups must give, from what the groups had: dicts and loops."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torch_dynemb.ops.columns import WAITING_BASE
from torch_dynemb.policy.half_life import counts_of, time_of
from torch_dynemb.table.content import optimizer_steps, read_content, read_counts, score_names
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.lookup import find
from torch_dynemb.table.row_access import handle_rows
from torch_dynemb.table.tables import one_table

Id = int


@dataclass
class Entry:
    """What a table has of an id.

    Attributes:
        row: of the table's dtype.
        state: by name.
        scores: by name.
        place: number of the row.
        restarted: it was removed and inserted again, in another row.
    """

    row: Tensor
    state: dict[str, Tensor]
    scores: dict[str, int]
    place: int = -1
    restarted: bool = False

    def same(self, other: Entry) -> bool:
        """Whether all bits are equal."""
        return (
            torch.equal(self.row, other.row)
            and self.scores == other.scores
            and all(torch.equal(of, other.state[name]) for name, of in self.state.items())
        )


@dataclass
class Shard:
    """What a rank has of a table.

    Attributes:
        entries: by id.
        counts: of admission, by id.
        clock: steps, seconds and updates of the optimizer.
    """

    entries: dict[Id, Entry] = field(default_factory=dict)
    counts: dict[Id, int] = field(default_factory=dict)
    clock: tuple[int, int, int] = (0, 0, 0)


def shard_of(group: TableGroup, table: int, before: Shard | None = None) -> Shard:
    """Copy what a rank has of a table.

    Args:
        before: what the rank had after the last sync.
    """
    content = read_content(group.tables, table)
    places = handle_rows(find(group.tables, *one_table(group.tables, table, content.ids)).handles)
    entries = {
        id: Entry(
            content.rows[k].clone(),
            {name: of[k].clone() for name, of in content.state.items()},
            {name: int(of[k]) for name, of in content.scores.items()},
            int(places[k]),
        )
        for k, id in enumerate(content.ids.tolist())
    }
    for id, entry in entries.items() if before is not None else ():
        known = before.entries.get(id)  # type: ignore[union-attr]
        entry.restarted = known is not None and known.place != entry.place
    counted = read_counts(group.tables, table)
    counts: dict[Id, int] = {}
    if counted is not None:
        counts = dict(zip(counted.ids.tolist(), counted.counts.tolist(), strict=True))
    clock = group.index.clock[:2].tolist()
    return Shard(entries, counts, (clock[0], clock[1], optimizer_steps(group.tables, table)))


def expected(group: TableGroup, table: int, base: Shard, groups: list[Shard]) -> Shard:
    """What all groups must have after a sync.

    Args:
        group, table: of this rank, for its config and initial rows.
        base: what the groups had after the last sync.
        groups: what they have now.
    """
    policy = group.config.tables[table].policy
    clock: Any = tuple(max(of.clock[k] for of in groups) for k in range(3))
    result = Shard(clock=clock)
    for id in sorted({id for of in (base, *groups) for id in of.entries}):
        before = base.entries.get(id)
        now = [of.entries.get(id) for of in groups]
        touched = [of is not None and (before is None or not of.same(before)) for of in now]
        if not any(touched):
            if all(of is not None for of in now):
                assert before is not None
                result.entries[id] = _in_counts(before, policy.half_life_ticks, clock)
            continue
        fresh = _initial(group, table, id)
        found = [fresh if of is None else of for of in now]
        scores = {name: _score(name, id, policy, base, groups, clock) for name in fresh.scores}
        result.entries[id] = Entry(
            _mean([of.row for of in found]),
            {name: _mean([of.state[name] for of in found]) for name in fresh.state},
            scores,
        )
    bound = group.config.capacity_bound(table)
    over = 0 if bound is None else max(0, len(result.entries) - bound)
    if over:
        deciding = group.scores.deciding(table)
        evicts = policy.full(budget=False) == "evict"
        order = sorted(
            (of for of in result.entries.items() if evicts or of[0] not in base.entries),
            key=lambda of: (of[1].scores[deciding], of[1].scores["step"], of[0]),
        )
        for id, _ in order[:over]:
            del result.entries[id]
    for id in {id for of in (base, *groups) for id in of.counts}:
        if any(id in of.entries for of in groups) and id in _merged_ids(base, groups):
            continue
        ticks = policy.admission_ticks
        before = waiting_count(base.counts.get(id, 0), ticks, clock)
        count = before
        for of in groups:
            count += waiting_count(of.counts.get(id, 0), ticks, clock) - before
        if count > 0:
            result.counts[id] = count
    return result


def waiting_count(stored: int, half_life: int, clock: tuple[int, int, int]) -> int:
    """A count of admission in occurrences; with a half-life, in millionths as of a clock."""
    if half_life == 0 or stored == 0:
        return stored
    time = time_of(half_life, step=clock[0], now=clock[1])
    return round(1e6 * float(counts_of(torch.tensor(stored - WAITING_BASE), time)))


def _merged_ids(base: Shard, groups: list[Shard]) -> set[Id]:
    """Ids with a row in a group that touched them, or with a row in all groups."""
    found = set()
    for id in {id for of in groups for id in of.entries}:
        before = base.entries.get(id)
        of_groups = [of.entries.get(id) for of in groups]
        if all(of_groups) or any(
            of is not None and (before is None or not of.same(before)) for of in of_groups
        ):
            found.add(id)
    return found


def _score(
    name: str, id: Id, policy: Any, base: Shard, groups: list[Shard], clock: tuple[int, int, int]
) -> int:
    before = base.entries[id].scores[name] if id in base.entries else None
    here = [of.entries[id] for of in groups if id in of.entries]
    now = [of.scores[name] for of in here]
    if name == "frequency":
        waited = base.counts.get(id, 0)
        total = waited if before is None else before
        for of in groups:
            if id in of.entries:
                count = of.entries[id].scores[name]
                start = waited if before is None else before
                again = of.entries[id].restarted or count < start
                total += count if again else count - start
            elif before is None:
                total += max(0, of.counts.get(id, 0) - waited)
        return total
    if name == "decayed":
        time = time_of(policy.half_life_ticks, step=clock[0], now=clock[1])
        counted = 0.0 if before is None else float(counts_of(torch.tensor(before), time))
        since = counted
        for of in groups:
            if id in of.entries:
                own = float(counts_of(torch.tensor(of.entries[id].scores[name]), time))
                since += own if of.entries[id].restarted else own - counted
        return round(1e6 * since)
    if name == "custom" and policy.combine == "sum":
        added = [
            of.entries[id].scores[name] - (0 if of.entries[id].restarted else before or 0)
            for of in groups
            if id in of.entries
        ]
        return (before or 0) + sum(added)
    if name == "custom" and policy.combine == "last":
        changed = [of.scores[name] for of in here if of.restarted or of.scores[name] != before]
        return max(changed) if changed else int(before or 0)
    return max(now)


def _in_counts(entry: Entry, half_life: int, clock: tuple[int, int, int]) -> Entry:
    """An entry with its decayed score as a count."""
    copied = replace(entry, scores=dict(entry.scores))
    decayed_to_counts(Shard({0: copied}), half_life, clock)
    return copied


def decayed_to_counts(shard: Shard, half_life: int, clock: tuple[int, int, int]) -> None:
    """Turn decayed scores into counts as of a clock, which may be compared with a tolerance."""
    if half_life == 0:
        return
    time = time_of(half_life, step=clock[0], now=clock[1])
    for entry in shard.entries.values():
        if "decayed" in entry.scores:
            count = counts_of(torch.tensor(entry.scores["decayed"]), time)
            entry.scores["decayed"] = round(1e6 * float(count))


def _initial(group: TableGroup, table: int, id: Id) -> Entry:
    """An id that a group has never seen."""
    config = group.config.tables[table]
    names = score_names(group.tables, table)
    state = {}
    optimizer = group.config.optimizer
    for tensor in () if optimizer is None else optimizer.state:
        columns = 1 if tensor.per_row else config.embedding_dim
        value = getattr(optimizer, "initial_accumulator_value", 0.0)
        first = tensor.name == optimizer.state[0].name  # type: ignore[union-attr]
        state[tensor.name] = torch.full((columns,), value if first else 0.0, dtype=tensor.dtype)
    empty = TableGroup(**{**group.config.arguments(), "device": "cpu"})
    rows = empty.read(table, torch.tensor([id]))  # of an unknown id
    return Entry(rows[0].to(config.dtype), state, dict.fromkeys(names, 0))


def _mean(values: list[Tensor]) -> Tensor:
    if not values[0].dtype.is_floating_point:
        return torch.stack(values).amax(0)
    wide = torch.float64 if values[0].dtype == torch.float32 else torch.float32
    total = torch.zeros_like(values[0], dtype=wide)
    for of in values:
        total += of
    return (total / len(values)).to(values[0].dtype)


__all__ = ["Entry", "Shard", "decayed_to_counts", "expected", "shard_of", "waiting_count"]
