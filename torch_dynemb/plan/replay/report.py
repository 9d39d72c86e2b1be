"""Printed report of a replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch_dynemb.console.lines import in_bytes
from torch_dynemb.plan.report_parts import Part, count, percent


def replay_parts(replay: Mapping[str, Any]) -> Iterator[Part]:
    """Iterate over the parts of a report.

    Args:
        replay: result of :func:`torch_dynemb.plan.replay.outcome.replayed`.
    """
    yield _runs(replay)
    if replay["label"] is not None:
        yield _auc_suggestion(replay)
    else:
        yield _hit_rates(replay)


def _runs(replay: Mapping[str, Any]) -> Part:
    judged, sampled = replay["label"] is not None, replay["sampled_columns"]
    heads = ["policy", "rows", "of the ids", "memory", "hit rate"]
    heads += ["+-"] if sampled else []
    heads += ["evictions an id"]
    heads += ["AUC", "below all ids", "+-"] if judged else []
    rows = [[*heads, "step (CPU)"]]
    for run in replay["runs"]:
        row = [
            run["policy"],
            count(run["rows"]),
            percent(run["share_of_ids"]),
            in_bytes(run["memory"]),
            _percent(run["hit_rate"]),
        ]
        row += [_percent(2 * run["hit_rate_error"])] if sampled else []
        row += [f"{run['evictions_an_id']:.2f}"]
        if judged:
            below, error = run["auc_below_unlimited"], run["auc_error"]
            row += [f"{run['auc']:.4f}", f"{below:.4f}", f"{2 * error:.4f}"]
        ms = run["step_ms"]["cpu"]
        rows.append([*row, "-" if ms is None else f"{ms:.1f} ms"])
    return Part("Replay", rows, _notes(replay))


def _notes(replay: Mapping[str, Any]) -> list[str]:
    row = replay["row"]
    notes = [
        f"Steps have {count(replay['batch_size'])} lines. Hit rate: lookups of an id with a row, "
        f"from the middle of {count(replay['steps'])} steps on. Memory: {row['dim']} columns of "
        f"{row['dtype']}, {row['optimizer']}."
    ]
    if replay["sampled_columns"]:
        least = min(replay["sampled_columns"].values())
        notes.append(
            f"Of {len(replay['sampled_columns'])} columns a sample of the ids by hash is replayed, "
            f"{percent(least)} or more, in tables scaled alike (SHARDS). +- is two standard "
            "errors, from 16 groups of these ids."
        )
    if replay["label"] is not None:
        notes.append(
            f"AUC: of a logistic regression over the ids (FTRL), trained on the first "
            f"{count(replay['trained_lines'])} lines, on the last "
            f"{count(replay['lines'] - replay['trained_lines'])}. +- is two standard errors of the "
            "difference (DeLong)."
        )
    notes.append(_cost_note(replay))
    return notes


def _cost_note(replay: Mapping[str, Any]) -> str:
    machines = {
        device: sorted({run["step_ms_of"][device] or "" for run in replay["runs"]} - {""})
        for device in ("cpu", "cuda")
    }
    if not machines["cpu"]:
        note = "Step: no results of benchmarks were found, which a checkout of the repository has."
    else:
        note = (
            "Step: ids of the tables alone, 64 columns, estimated from benchmarks of LRU and LFU "
            f"({'; '.join(machines['cpu'])}); other policies have not been measured."
        )
    if not machines["cuda"]:
        note += " GPUs have not been measured."
    return note


def _auc_suggestion(replay: Mapping[str, Any]) -> Part:
    whole = replay["runs"][0]
    margin = replay["auc_margin"]
    if replay["suggestion"] is None:
        note = (
            f"Every policy and capacity of the list loses more than {margin} of the AUC of all "
            f"ids, {whole['auc']:.4f}: give larger --capacities."
        )
        return Part("Least memory without loss of AUC: none of these", [], [note])
    best = replay["runs"][replay["suggestion"]]
    notes = [
        f"AUC {best['auc']:.4f} in {in_bytes(best['memory'])}; all ids have {whole['auc']:.4f} in "
        f"{in_bytes(whole['memory'])}.",
        best["code"],
    ]
    if len(best["rows_of_columns"]) > 1:
        rows = ", ".join(f"{name} {count}" for name, count in best["rows_of_columns"].items())
        notes.append(f"The capacity of each column's table: {rows}")
    if 2 * best["auc_error"] > margin:
        notes.append(
            f"The held-out lines do not settle it: the difference is known to +-"
            f"{2 * best['auc_error']:.4f}, and the margin is {margin}. Give more lines."
        )
    title = f"{best['policy']}, {percent(best['share_of_ids'])} of the ids"
    return Part(f"Least memory without loss of AUC: {title}", [], notes)


def _hit_rates(replay: Mapping[str, Any]) -> Part:
    best: dict[int, Mapping[str, Any]] = {}
    for run in replay["runs"][1:]:
        if run["capacity"] not in best or run["hit_rate"] > best[run["capacity"]]["hit_rate"]:
            best[run["capacity"]] = run
    rows = [["rows", "best policy", "hit rate", "below all ids"]]
    whole = replay["runs"][0]["hit_rate"]
    for capacity, run in sorted(best.items()):
        rows.append(
            [
                count(capacity),
                run["policy"],
                _percent(run["hit_rate"]),
                _percent(whole - run["hit_rate"]),
            ]
        )
    note = "A hit rate is not quality: name a --label to compare the AUC."
    return Part("Best policy by capacity", rows, [note])


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


__all__ = ["replay_parts"]
