"""Every op of torch.ops.dynemb that works on ids or rows, in one small call: nanoseconds an id.

The arguments are those of tests, of gpu/small_shapes.py and of feature_ops.py: some ten to some
thousand ids. A row shows regressions: run.py --compare sees it grow if a kernel or the
call of an op gets slower. Tensors that an op writes are set back before each call. One
thread, no peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from common.command import is_selected, parser, positive
from common.report import Report, quantity
from common.timing import interleave_rounds
from single_ops.calls import COUNTED, OpCall, calls_of
from single_ops.left_out import LEFT_OUT

import torch_dynemb  # noqa: F401  # registers the ops
from torch_dynemb._library.op_names import op_names

BENCH = "ops"


def timed_names() -> set[str]:
    """Return names of the ops that are timed: all but those that are left out with a reason."""
    return set(op_names()) - LEFT_OUT.keys()


def timed(call: OpCall, calls: int) -> Callable[[int], float]:
    """Return a function that times a round: the mean ms of a call, without restoring tensors."""
    op, arguments, keywords = call.op, call.arguments, call.keywords
    changed = call.changed()
    before = [tensor.clone() for tensor in changed]

    def run(_: int) -> float:
        seconds = 0.0
        for _ in range(calls):
            for tensor, content in zip(changed, before, strict=True):
                tensor.copy_(content)
            begin = time.perf_counter()
            op(*arguments, **keywords)
            seconds += time.perf_counter() - begin
        return seconds / calls * 1e3

    return run


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--calls", type=positive, help="calls a round (default 20)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    names = {name for name in timed_names() if is_selected(options.only, name, "")}
    calls = calls_of(names)
    report = Report(as_json=options.json, cases=len(calls))
    count = options.calls or (2 if options.quick else 20)
    with torch.no_grad():
        timings = interleave_rounds(
            {name: timed(call, count) for name, call in calls.items()},
            rounds=options.rounds,
            warmup=1,
        )
    for name, call in calls.items():
        counted, timing = call.count(), timings[name]
        median, least = (ms * 1e6 / counted for ms in (timing.median_ms, timing.min_ms))
        unit = f"ns {COUNTED[call.counted()]}"
        report.add(quantity(BENCH, name, median, unit, value_min=least, count=counted))
    report.close()


if __name__ == "__main__":
    main()
