"""Metrics of a server for Prometheus. The C++ server has the same ones, from ``metrics.h``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

import torch_dynemb as td
from tutorials.serving.batching import Batches

BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """Counts and latencies of requests, and the state of a model.

    Args:
        model: the model that is served.
        follower: its follower, if it follows a delta log.
        batches: runs requests together; None: each alone.
    """

    def __init__(
        self,
        model: td.serving.ServedModel,
        follower: td.delta_log.Follower | None,
        batches: Batches | None = None,
    ) -> None:
        disable_created_metrics()
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "dynemb_requests", "Answered requests", ["call", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "dynemb_request_seconds",
            "Time from a request to its answer",
            ["call"],
            buckets=BUCKETS,
            registry=self._registry,
        )
        self._registry.register(_ModelState(model, follower, batches))

    def answered(self, call: str, status: int, seconds: float) -> None:
        """Count a request.

        Args:
            call: infer, run or rows.
            status: HTTP status of the answer.
            seconds: time until the answer.
        """
        self._requests.labels(call, str(status)).inc()
        self._seconds.labels(call).observe(seconds)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)


class _ModelState(Collector):
    """State of a model, read when Prometheus asks."""

    def __init__(
        self,
        model: td.serving.ServedModel,
        follower: td.delta_log.Follower | None,
        batches: Batches | None,
    ) -> None:
        self._model, self._follower, self._batches = model, follower, batches

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Iterate over the metrics."""
        live = self._model.stats()
        ids = GaugeMetricFamily("dynemb_rows", "Ids with a row", labels=["table"])
        free = GaugeMetricFamily("dynemb_free_rows", "Rows for new ids", labels=["table"])
        updates = CounterMetricFamily("dynemb_updates", "Updates of rows", labels=["table"])
        for name, table in self._model.tables.items():
            stats = live.get(name)
            ids.add_metric([name], table.ids if stats is None else stats.ids)
            free.add_metric([name], 0 if stats is None else stats.free_rows)
            updates.add_metric([name], 0 if stats is None else stats.updates)
        yield from (ids, free, updates)
        if self._batches is not None:
            yield CounterMetricFamily(
                "dynemb_runs", "Runs of the model for requests in batches", self._batches.runs
            )
        if self._model.counts_missing:
            missing = CounterMetricFamily(
                "dynemb_missing_ids", "Ids of requests without a row", labels=["table"]
            )
            for name, count in self._model.missing.items():
                missing.add_metric([name], count)
            yield missing
        files = self._model.row_files()
        if files:
            read = CounterMetricFamily(
                "dynemb_rows_read", "Rows of files that were looked up", labels=["file", "from"]
            )
            for name, of in files.items():
                read.add_metric([name, "cache"], of.hits)
                read.add_metric([name, "file"], of.misses)
            yield read
        if self._follower is not None:
            yield GaugeMetricFamily(
                "dynemb_following", "1 while commits are taken, else 0", 1 - self._stopped()
            )
        # with --shared-memory another process may take them
        if self._model.sequence is not None:
            yield GaugeMetricFamily(
                "dynemb_commit_sequence", "Number of the last commit", self._model.sequence
            )
        age = self._model.commit_age
        if age is not None:
            yield GaugeMetricFamily(
                "dynemb_commit_age_seconds", "Time since the last commit was taken", age
            )

    def _stopped(self) -> bool:
        assert self._follower is not None
        try:
            self._follower.check()
        except Exception:
            return True
        return False
