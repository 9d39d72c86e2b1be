"""What one insertion with a policy does, in plain Python, from the state before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from collisions import bucket_of, first_hashes

import torch_dynemb as td
from torch_dynemb.ops.columns import BUCKET_WIDTH, Table

VICTIM_BUCKETS = 8


@dataclass
class Entry:
    """An id of a table: its handle, its place in the index, its scores by name."""

    handle: int
    bucket: int
    scores: dict[str, int]


@dataclass
class Expected:
    """What a call should leave behind; by id."""

    scores: dict[int, dict[str, int]]
    handles: dict[int, int]  # -3: refused
    evicted: list[int] = field(default_factory=list)
    rejected: int = 0
    not_admitted: int = 0


def entries_of(group: td.TableGroup, table: int) -> dict[int, Entry]:
    """The content of a table."""
    active = group.active_buckets(table)
    buckets, scores = group.buckets[active].tolist(), group.scores[active].tolist()
    entries = {}
    for number, (line, words) in enumerate(zip(buckets, scores, strict=True)):
        for slot in range(BUCKET_WIDTH):
            if line[BUCKET_WIDTH + slot] > 0:
                kept = {
                    name: words[w * BUCKET_WIDTH + slot]
                    for w, name in enumerate(group.layout.score_words)
                }
                entries[line[slot]] = Entry(line[BUCKET_WIDTH + slot] - 1, number, kept)
    return entries


def next_handle(handle: int) -> int:
    generation = (handle + 1) & ((1 << 28) - 1)
    return (handle >> 28) << 28 | (generation or 1)


def expected_call(
    group: td.TableGroup, table: int, ids: Sequence[int], *, admitted: set[int] | None = None
) -> Expected:
    """What looking up ``ids`` in training does, if the index is not rehashed meanwhile.

    Args:
        admitted: the new ids that are; None: all.
    """
    policy = group.tables_config[table].policy
    step, now = group.clock[0].item(), group.clock[1].item()
    before = entries_of(group, table)
    fresh = {"step": step, "timestamp": now, "custom": int(group.clock[2 + table])}
    fresh["expiry"] = now + policy.ttl if policy.ttl else (1 << 63) - 1
    words = group.layout.score_words
    new = [id for id in dict.fromkeys(ids) if id not in before]
    result = Expected({id: dict(entry.scores) for id, entry in before.items()}, {})
    for id in set(ids) & before.keys():
        kept = result.scores[id]
        kept |= {name: value for name, value in fresh.items() if name in words}
        if "expiry" in words:
            kept["expiry"] = max(before[id].scores["expiry"], fresh["expiry"])
        if "frequency" in words:
            kept["frequency"] += list(ids).count(id)
        result.handles[id] = before[id].handle
    room = len(new)
    if policy.capacity is not None and policy.on_full != "grow":
        room = max(policy.capacity - len(before), 0)
    count = int(group.tables[table, Table.BUCKET_COUNT])
    taken: set[int] = set()
    for id in new:
        if admitted is not None and id not in admitted:
            result.not_admitted += 1
            result.handles[id] = -3
            continue
        handle = 0
        if room > 0:
            room -= 1
        else:
            first = int(bucket_of(first_hashes(group, table, torch.tensor([id])), count)[0])
            window = {(first + k) % count for k in range(VICTIM_BUCKETS)}
            candidates = [
                (result.scores[other][policy.scores[0]], result.scores[other]["step"], other)
                for other, entry in before.items()
                if entry.bucket in window
                and other not in taken
                and step - result.scores[other]["step"] >= policy.protected_steps
            ]
            if policy.on_full == "default" or not candidates:
                result.rejected += 1
                result.handles[id] = -3
                continue
            victim = min(candidates)[2]
            taken.add(victim)
            result.evicted.append(victim)
            handle = next_handle(before[victim].handle)
        result.handles[id] = handle  # 0: a row that no other id has
        result.scores[id] = {name: fresh[name] for name in words if name in fresh}
        if "frequency" in words:
            result.scores[id]["frequency"] = list(ids).count(id)
    for id in result.evicted:
        del result.scores[id]
    return result
