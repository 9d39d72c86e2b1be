"""CPU seconds of tests with their processes, and the limit of those that are not ``long``.

The first test that imports, compiles or starts something for all others may exceed the limit, so a
test fails only if it exceeds the limit twice in a row. On a machine with much other work, CPU time
is half as much again; no test fails there for it. Other machines of a host are not seen, but slow
this one down: where a loop takes 2.1 times its usual time, tests take 2.3 to 3.1 times theirs, and
the limit grows with the power 1.5. At the usual speed it is as given. Fixtures do not count.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from time import process_time
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

USUAL_S = 0.004  # CPU seconds of the loop of slowness(), on an idle machine
_TICKS = os.sysconf("SC_CLK_TCK")
_SECONDS = "cpu_seconds"


def cpu_seconds() -> float:
    """Return the CPU seconds so far of this process, and of its living and its ended children."""
    own = os.times()
    total = own.user + own.system + own.children_user + own.children_system
    waiting = list(_children(os.getpid()))
    while waiting:
        pid = waiting.pop()
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        total += sum(map(int, fields[11:15])) / _TICKS
        waiting += _children(pid)
    return total


def _children(pid: int) -> Iterator[int]:
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                yield from map(int, file.read().split())
    except OSError:
        return  # it has ended


class CpuTime:
    """Measures tests, fails those above the limit, and ends a run with what it has taken.

    Args:
        config: of the run; ``--cpu-limit`` is the limit in seconds, 0 for none. The emulated and
            the marked device are slower, and have none.
    """

    def __init__(self, config: pytest.Config) -> None:
        on_cpu = config.getoption("--device") == "cpu"
        self._limit: float = config.getoption("--cpu-limit") if on_cpu else 0.0
        self._twice: bool = config.getoption("--twice")
        self._of_workers = 0.0
        self._of_tests: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        begin = cpu_seconds()
        try:
            return (yield)
        finally:
            item.user_properties.append((_SECONDS, round(cpu_seconds() - begin, 3)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if self._exceeds(item, reports) or self._again(reports):
            item.user_properties.clear()
            item._initrequest()  # type: ignore[attr-defined]  # fresh fixtures, as pytest makes them
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            if self._exceeds(item, reports, slowness()) and not _has_much_other_work():
                call = reports[1]
                call.outcome = "failed"
                call.longrepr = (
                    f"{item.nodeid} took {_seconds_of(call):.2f} CPU seconds; without the marker "
                    f"long it may take {self._limit:g}: make it smaller, or mark it long"
                )
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _again(self, reports: list[pytest.TestReport]) -> bool:
        return self._twice and len(reports) == 3 and all(report.passed for report in reports)

    def _exceeds(
        self, item: pytest.Item, reports: list[pytest.TestReport], times: float = 1.0
    ) -> bool:
        if not self._limit or item.get_closest_marker("long") is not None:
            return False
        passed = all(report.passed for report in reports)
        return passed and _seconds_of(reports[1]) > self._limit * times**1.5

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._of_tests[report.nodeid] += _seconds_of(report)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._of_workers += getattr(node, "workeroutput", {}).get(_SECONDS, 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_SECONDS] = cpu_seconds()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        folders: dict[str, float] = defaultdict(float)
        for name, seconds in self._of_tests.items():
            folders[name.partition("::")[0].rpartition("/")[0]] += seconds
        total = cpu_seconds() if not self._of_workers else self._of_workers
        terminalreporter.section(f"{total:.0f} CPU seconds, {sum(folders.values()):.0f} of tests")
        by_time = sorted(folders.items(), key=lambda item: -item[1])
        terminalreporter.line(", ".join(f"{name} {seconds:.0f}" for name, seconds in by_time))
        for name, seconds in sorted(self._of_tests.items(), key=lambda item: -item[1])[:10]:
            terminalreporter.line(f"{seconds:7.2f} s  {name}")


def slowness() -> float:
    """Return how many times as long as usually this machine takes now, at least 1."""
    begin, total = process_time(), 0
    for number in range(100_000):
        total += number & 7
    return max(1.0, (process_time() - begin) / USUAL_S)


def _has_much_other_work() -> bool:
    return os.getloadavg()[0] > 2 * (os.cpu_count() or 1)


def _seconds_of(report: pytest.TestReport) -> float:
    return float(dict(report.user_properties).get(_SECONDS, 0.0))  # type: ignore[arg-type]


__all__ = ["USUAL_S", "CpuTime", "cpu_seconds", "slowness"]
