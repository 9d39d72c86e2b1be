"""What one insertion with a policy does, in plain Python, from the state before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from collisions import bucket_of, first_hashes

import torch_dynemb as td
from torch_dynemb.ops.columns import BUCKET_WIDTH, Table

VICTIM_BUCKETS = 8
WHOLE_INDEX_BUCKETS = 32
NEVER = (1 << 63) - 1
PLAIN = td.FeaturePolicy()


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
    counts: dict[int, float]  # of ids that wait for admission
    evicted: list[int] = field(default_factory=list)
    rejected: int = 0
    not_admitted: int = 0


@dataclass
class Seen:
    """What a call says of an id: occurrences that count, and the policies that bring it."""

    counted: int
    updating: list[td.FeaturePolicy]
    brought_by: list[td.FeaturePolicy]


def entries_of(group: td.TableGroup, table: int) -> dict[int, Entry]:
    """The content of a table."""
    active = group.index.active_buckets(table)
    buckets, scores = group.index.buckets[active].tolist(), group.index.scores[active].tolist()
    entries = {}
    for number, (line, words) in enumerate(zip(buckets, scores, strict=True)):
        for slot in range(BUCKET_WIDTH):
            if line[BUCKET_WIDTH + slot] > 0:
                kept = {
                    name: words[w * BUCKET_WIDTH + slot]
                    for w, name in enumerate(group.config.layout.score_words)
                }
                entries[line[slot]] = Entry(line[BUCKET_WIDTH + slot] - 1, number, kept)
    return entries


def next_handle(handle: int) -> int:
    generation = (handle + 1) & ((1 << 28) - 1)
    return (handle >> 28) << 28 | (generation or 1)


def expected_call(
    group: td.TableGroup, table: int, ids: Sequence[int], *, admitted: set[int] | None = None
) -> Expected:
    """What looking up ``ids`` in training does; see :func:`expected_lookup`."""
    return expected_lookup(group, table, [(PLAIN, ids)], {}, admitted=admitted)


def expected_lookup(
    group: td.TableGroup,
    table: int,
    features: Sequence[tuple[td.FeaturePolicy, Sequence[int]]],
    counts: Mapping[int, float],
    *,
    admitted: set[int] | None = None,
) -> Expected:
    """What a training lookup by several features does, if the index is not rehashed meanwhile.

    Args:
        counts: of ids that wait for admission; of a sketch, in which no two ids meet. With a
            half-life in steps, the sum of 2 ** (step / half_life) over the occurrences.
        admitted: the new ids that are, where no rule counts; None: all.
    """
    policy = group.config.tables[table].policy
    step, now = group.index.clock[0].item(), group.index.clock[1].item()
    before = entries_of(group, table)
    fresh = {"step": step, "timestamp": now, "custom": int(group.index.clock[2 + table])}
    words = group.config.layout.score_words
    seen: dict[int, Seen] = {}
    for feature, ids in features:
        for id in ids:
            entry = seen.setdefault(id, Seen(0, [], []))
            entry.brought_by.append(feature)
            if feature.updates_scores:
                entry.counted += 1
                entry.updating.append(feature)

    def expiry(features: Sequence[td.FeaturePolicy]) -> int:
        ttls = [feature.ttl or policy.ttl for feature in features]
        return max(NEVER if ttl is None else now + ttl for ttl in ttls)

    result = Expected({id: dict(entry.scores) for id, entry in before.items()}, {}, dict(counts))
    for id in seen.keys() & before.keys():
        kept = result.scores[id]
        kept["step"] = step
        if seen[id].updating:
            kept |= {name: value for name, value in fresh.items() if name in words}
        if seen[id].updating and "expiry" in words:
            kept["expiry"] = max(before[id].scores["expiry"], expiry(seen[id].updating))
        if "frequency" in words:
            kept["frequency"] += seen[id].counted
        result.handles[id] = before[id].handle
    new = [id for id in seen if id not in before]
    room = len(new)
    if policy.capacity is not None and policy.on_full != "grow":
        room = max(policy.capacity - len(before), 0)
    taken: set[int] = set()
    rule = policy.admission
    unit = 2.0 ** (step / -policy.admission_ticks) if policy.admission_ticks else 1
    for id in new:
        total: float = seen[id].counted * unit
        counting = isinstance(rule, td.AdmitFrequent | td.AdmitFrequentSketch)
        if counting:
            total += counts.get(id, 0)
            least = min(feature.threshold or rule.threshold for feature in seen[id].brought_by)
            is_admitted = total >= least * unit * (1 - 1e-6 * (unit != 1))
        else:
            is_admitted = admitted is None or id in admitted
        handle = 0  # a row that no other id has
        if not is_admitted:
            handle = -3
            result.not_admitted += 1
        elif room > 0:
            room -= 1
        else:
            victim = victim_of(group, table, id, before, result, taken)
            if victim is None:
                handle = -3
                result.rejected += 1
            else:
                taken.add(victim)
                result.evicted.append(victim)
                handle = next_handle(before[victim].handle)
        result.handles[id] = handle
        if handle == -3:
            if counting and seen[id].counted > 0:
                result.counts[id] = total
            continue
        if isinstance(rule, td.AdmitFrequent):
            result.counts.pop(id, None)
        result.scores[id] = {name: fresh[name] for name in words if name in fresh}
        if "expiry" in words:
            result.scores[id]["expiry"] = expiry(seen[id].updating or seen[id].brought_by)
        if "frequency" in words:
            frequency = int(total)
            if policy.admission_ticks:
                known = least if id in counts else 0
                frequency = max(known, seen[id].counted)
            result.scores[id]["frequency"] = frequency
    for id in result.evicted:
        del result.scores[id]
    return result


def victim_of(
    group: td.TableGroup,
    table: int,
    id: int,
    before: Mapping[int, Entry],
    result: Expected,
    taken: set[int],
) -> int | None:
    """Return the id to evict for a new one."""
    policy = group.config.tables[table].policy
    if policy.on_full == "default":
        return None
    step = group.index.clock[0].item()
    count = int(group.index.tables[table, Table.BUCKET_COUNT])
    first = int(bucket_of(first_hashes(group, table, torch.tensor([id])), count)[0])
    looked_at = count if count <= WHOLE_INDEX_BUCKETS else VICTIM_BUCKETS
    window = {(first + k) % count for k in range(looked_at)}
    candidates = [
        (result.scores[other][policy.scores[0]], result.scores[other]["step"], other)
        for other, entry in before.items()
        if entry.bucket in window
        and other not in taken
        and step - result.scores[other]["step"] >= policy.protected_steps
    ]
    return min(candidates)[2] if candidates else None
