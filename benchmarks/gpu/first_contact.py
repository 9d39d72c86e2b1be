"""Program with four checks of what no emulator shows, each in a process of its own with a watchdog.

* ``host_pieces``: rows in host memory that kernels write, read as slices, as a save does.
* ``captured_step``: a captured lookup with its steps after the replays; a captured step is refused.
* ``deletion_beside_a_capture``: a table ends in another thread while this one captures.
* ``hot_scores``: milliseconds of a lookup in which one id is 9 % of the ids, by score.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_dynemb as td
from benchmarks.gpu.isolated import Tell, run_isolated

CHECK_SECONDS = 13.0
HOT_SHARE = 0.09


def _group(**arguments: Any) -> td.TableGroup:
    table = td.TableConfig("t", arguments.pop("dim", 8), **arguments)
    return td.TableGroup([table], optimizer=td.SGD(lr=1.0), seed=1, device="cuda")


def _looked_up(group: td.TableGroup, ids: Tensor) -> None:
    offsets = ids.numel() * torch.arange(2, device=ids.device)  # a copy would end a capture
    group.find_or_insert(ids, offsets, [0])


def host_pieces() -> str:
    group = _group(dim=64, storage=td.HostStore())
    ids = torch.arange(400_000, device="cuda")
    rows = (group.insert(0, ids) >> 28).cpu()
    group.materialize()
    expected = torch.empty(len(ids), 64)
    expected[rows] = group.read(0, ids).cpu()
    tensors = group.state.tensors().items()
    saved = next(tensor for name, tensor in tensors if name.endswith(".weights"))
    torch.testing.assert_close(saved.cpu(), expected, rtol=0, atol=0)
    return f"equal; bytes by place: {group.usage.split_rows()}"


def captured_step() -> str:
    group, ids = _group(), torch.arange(64, device="cuda")
    for _ in range(2):
        _looked_up(group, ids)
        group.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    refused = ""
    with torch.cuda.graph(graph):
        _looked_up(group, ids)
        try:
            group.step()
        except RuntimeError as error:
            refused = str(error)
    assert "after every replay" in refused, refused or "a captured step was accepted"
    for _ in range(5):
        ids += 64
        graph.replay()
        group.step()
    torch.cuda.synchronize()
    assert group.size(0) == 6 * 64, group.size(0)
    return "refused in the capture; five replays with their steps"


def deletion_beside_a_capture() -> str:
    group, ended = _group(), [_group()]
    ids = torch.arange(64, device="cuda")
    for one in (group, ended[0]):
        _looked_up(one, ids)
        one.step()
    del one
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        _looked_up(group, ids)
        thread = threading.Thread(target=ended.clear)
        thread.start()
        thread.join()
        _looked_up(group, ids)
    graph.replay()
    group.step()
    torch.cuda.synchronize()
    return "the capture survived"


def hot_scores() -> str:
    found = []
    for score in ("step", "frequency", "decayed"):
        more = {"half_life_steps": 100} if score == "decayed" else {}
        group = _group(policy=td.Policy(score=score, **more))  # type: ignore[arg-type]
        for count in (1 << 14, 1 << 17, 1 << 20):  # a cliff shows before it takes seconds
            ids = torch.randperm(count, device="cuda")
            ids[torch.rand(count, device="cuda") < HOT_SHARE] = 5
            _looked_up(group, ids)
            group.step()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            _looked_up(group, ids)
            torch.cuda.synchronize()
            took = 1e3 * (time.perf_counter() - begin)
            group.step()
            found.append(f"{score} ({count} ids): {took:.2f} ms")
            if took > 200:
                break
    return ", ".join(found)


CHECKS: tuple[Callable[[], str], ...] = (
    host_pieces,
    captured_step,
    deletion_beside_a_capture,
    hot_scores,
)


def run_check(check: Callable[[], str]) -> dict[str, Any]:
    """Run a check in a process of its own, and return its record."""
    record: dict[str, Any] = {"check": check.__name__, "result": "failed", "reason": ""}

    def work(tell: Tell) -> None:
        try:
            tell({"result": "passed", "reason": check()})
        except Exception as error:
            tell({"reason": f"{type(error).__name__}: {str(error)[:1000]}"})

    print(f"{check.__name__} begins", flush=True)
    ended = run_isolated(work, record.update, seconds=CHECK_SECONDS)
    if ended and not record["reason"]:
        record |= {"result": "failed", "reason": ended}
    print(f"{check.__name__}: {record['result']}. {record['reason']}", flush=True)
    return record


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--records", type=Path, help="file for the results, a JSON line each")
    options = arguments.parse_args()
    records = []
    for check in CHECKS:
        records.append(run_check(check))
        if options.records is not None:
            options.records.write_text("".join(json.dumps(one) + "\n" for one in records))
    if bad := [one["check"] for one in records if one["result"] != "passed"]:
        raise SystemExit(f"{len(bad)} checks failed: {', '.join(bad)}")


if __name__ == "__main__":
    main()
