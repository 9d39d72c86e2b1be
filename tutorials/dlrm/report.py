"""The report of a run: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from matplotlib.figure import Figure

from tutorials.dlrm import environment
from tutorials.dlrm.data import Data
from tutorials.dlrm.loop import Moment
from tutorials.dlrm.options import Options
from tutorials.dlrm.plot import Curves, by_feature, loss_and_auc, over_samples, png
from tutorials.dlrm.rows import FEATURE_NAMES

NAME = "report.html"

_MIB = 2**20

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.5rem }
p.summary { font-size: 1.15rem; border-left: 4px solid #1f77b4; padding-left: 1rem }
img { max-width: 100% }
table { border-collapse: collapse; font-size: 0.9rem }
td, th { text-align: left; vertical-align: top; padding: 0.15rem 1.5rem 0.15rem 0;
  border-bottom: 1px solid #ddd; overflow-wrap: anywhere }
"""


def write_report(
    opts: Options,
    data: Data,
    curves: Curves,
    moments: Sequence[Moment],
    summary: Mapping[str, Any],
) -> None:
    """Write the report into the folder of the job's output, once it is complete.

    Args:
        opts: Of the job.
        data: With the best reachable AUC, if known.
        curves: By name, points of the training and the AUC on held-out samples.
        moments: What was known about the dynamic tables as they were trained; at least one.
        summary: What the program prints at its end.
    """
    page = "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>DLRM with dynamic tables</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            "<h1>DLRM with dynamic tables</h1>",
            f'<p class="summary">{escape(conclusion(summary))}</p>',
            *_training(data, curves),
            *_ids(moments),
            *_memory(moments),
            *_throughput(moments),
            *_evictions(opts, moments),
            "<h2>Result</h2>",
            _table({name: _shown(value) for name, value in summary.items()}),
            "<h2>Settings</h2>",
            _table({_option(name): _shown(value) for name, value in asdict(opts).items()}),
            "<h2>Machine and versions</h2>",
            _table(environment.machine(opts) | environment.versions()),
            "</body>\n</html>\n",
        ]
    )
    path = opts.out / NAME
    temporary = path.with_name(path.name + ".unfinished")
    temporary.write_text(page)
    temporary.replace(path)


def conclusion(summary: Mapping[str, Any]) -> str:
    """Return what a reader should take from a run, in one sentence.

    Args:
        summary: What the program prints at its end.

    Example:
        >>> print(conclusion({"samples": 1000, "auc": 0.75, "baseline_auc": 0.74, "best_auc": None,
        ...     "ids": 300, "table_bytes": 3 * 2**20, "evicted": 0, "samples_per_s": 5000.0}))
        After 1,000 samples the AUC on held-out samples is 0.7500, 0.0100 above that of hashed \
tables in the same memory; the tables have 300 ids in 3.0 MiB, and training took 5,000 samples a \
second.
    """
    auc, baseline, best = (summary[name] for name in ("auc", "baseline_auc", "best_auc"))
    trained = f"After {summary['samples']:,} samples "
    if auc is None:
        trained += "there is no AUC, because the held-out samples have one label only"
    else:
        trained += f"the AUC on held-out samples is {auc:.4f}"
        compared = []
        if baseline is not None:
            side = "above" if auc >= baseline else "below"
            compared.append(
                f"{abs(auc - baseline):.4f} {side} that of hashed tables in the same memory"
            )
        if best is not None:
            compared.append(f"{best - auc:.4f} below the best that can be reached")
        trained += "".join(f", {text}" for text in compared[:1])
        trained += "".join(f" and {text}" for text in compared[1:])
    evicted = f" after {summary['evicted']:,} evictions" if summary["evicted"] else ""
    return (
        f"{trained}; the tables have {summary['ids']:,} ids in "
        f"{summary['table_bytes'] / _MIB:,.1f} MiB{evicted}, and training took "
        f"{summary['samples_per_s']:,.0f} samples a second."
    )


def _training(data: Data, curves: Curves) -> list[str]:
    return [
        "<h2>Loss and AUC</h2>",
        "<p>The running AUC is of samples before they were trained on; the past fades. Dashed: the "
        "AUC on the held-out samples, after training.</p>",
        _image(loss_and_auc(curves, best_auc=data.best_auc), "Loss and AUC against samples"),
    ]


def _ids(moments: Sequence[Moment]) -> list[str]:
    ids = [moment.ids for moment in moments]
    figure = by_feature(_samples(moments), ids, FEATURE_NAMES, "ids in the tables, by feature")
    return [
        "<h2>Ids</h2>",
        f"<p>{sum(ids[-1]):,} ids have a row at the end. A curve that goes on rising says that new "
        "ids keep coming.</p>",
        _image(figure, "Ids in the tables against samples"),
    ]


def _memory(moments: Sequence[Moment]) -> list[str]:
    curves = {
        "the process": [moment.resident_bytes / _MIB for moment in moments],
        "tables: rows, optimizer state, index": [m.table_bytes / _MIB for m in moments],
    }
    return [
        "<h2>Memory</h2>",
        "<p>The process also has code, libraries and the batches that are read.</p>",
        _image(over_samples(_samples(moments), curves, "MiB in memory"), "Memory against samples"),
    ]


def _throughput(moments: Sequence[Moment]) -> list[str]:
    before = [(0, 0.0), *((moment.samples, moment.seconds) for moment in moments)]
    rates = [
        (moment.samples - samples) / max(moment.seconds - seconds, 1e-9)
        for moment, (samples, seconds) in zip(moments, before, strict=False)
    ]
    mean = moments[-1].samples / max(moments[-1].seconds, 1e-9)
    curves = {"since the point before": rates, "on average": [mean] * len(moments)}
    figure = over_samples(_samples(moments), curves, "samples trained on in a second")
    return [
        "<h2>Throughput</h2>",
        f"<p>{mean:,.0f} samples a second on average, with reading and checkpoints.</p>",
        _image(figure, "Samples a second against samples"),
    ]


def _evictions(opts: Options, moments: Sequence[Moment]) -> list[str]:
    evicted = [moment.evicted for moment in moments]
    title = "<h2>Evictions by feature</h2>"
    if not sum(evicted[-1]):
        if opts.capacity is None:
            return [
                title,
                "<p>None: tables grow as long as ids come. --capacity bounds them.</p>",
            ]
        return [title, f"<p>None with --capacity {opts.capacity}.</p>"]
    figure = by_feature(_samples(moments), evicted, FEATURE_NAMES, "ids evicted so far, by feature")
    share = sum(evicted[-1]) / max(1, sum(moments[-1].ids))
    return [
        title,
        f"<p>{sum(evicted[-1]):,} ids had to go for others, {share:.1f} for each id that is in the "
        "tables at the end.</p>",
        _image(figure, "Evictions by feature against samples"),
    ]


def _samples(moments: Sequence[Moment]) -> list[int]:
    return [moment.samples for moment in moments]


def _image(figure: Figure, description: str) -> str:
    content = base64.b64encode(png(figure)).decode()
    return f'<p><img alt="{escape(description)}" src="data:image/png;base64,{content}"></p>'


def _table(facts: Mapping[str, str]) -> str:
    rows = "\n".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items()
    )
    return f"<table>\n{rows}\n</table>"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)
