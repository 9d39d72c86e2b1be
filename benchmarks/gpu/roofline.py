"""Plots what ops reached against their own limits, by width: a panel an op, rates over D."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.common.report import Row, read_rows

OPS = (
    "find",
    "find_or_insert_",
    "embedding_inference",
    "lookup",
    "SGD backward",
    "RowWiseAdagrad backward",
    "Adam backward",
    "SGD step",
    "RowWiseAdagrad step",
    "Adam step",
)
COLUMNS = 4
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # readable without colour vision


def points_of(rows: list[Row]) -> dict[str, dict[float, dict[int, Row]]]:
    """Return rows with a limit, eager ones left out: op -> U/N -> dim -> row."""
    points: dict[str, dict[float, dict[int, Row]]] = {}
    for row in rows:
        if "share" not in row or "limit_ms" not in row or ", eager" in row["case"]:
            continue
        points.setdefault(row["op"], {}).setdefault(row["share"], {})[row["dim"]] = row
    return points


def draw(rows: list[Row], title: str, path: Path) -> bool:
    """Write the plot.

    Args:
        rows: of steps.py.
        title: of the plot.
        path: PNG to write.

    Returns:
        False where no row has a limit; nothing is written then.
    """
    points = points_of(rows)
    ops = [op for op in OPS if op in points]
    if not ops:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    lines = -(-len(ops) // COLUMNS)
    figure, axes = pyplot.subplots(
        lines, COLUMNS, figsize=(4 * COLUMNS, 3.4 * lines), squeeze=False, sharex=True
    )
    dims = sorted({dim for shares in points.values() for by in shares.values() for dim in by})
    for number, axis in enumerate(axes.flat):
        if number >= len(ops):
            axis.set_visible(False)
            continue
        op = ops[number]
        for color, (share, by_dim) in zip(COLORS, sorted(points[op].items()), strict=False):
            x = sorted(by_dim)
            limit = [by_dim[dim]["ids"] / by_dim[dim]["limit_ms"] / 1e6 for dim in x]
            reached = [by_dim[dim]["g_ids_per_s"] for dim in x]
            axis.plot(x, limit, "--", color=color, linewidth=1)
            axis.plot(x, reached, "o-", color=color, markersize=4, label=f"U/N = {share:g}")
            for dim, value in zip(x, reached, strict=True):
                axis.annotate(
                    f"{100 * by_dim[dim]['fraction']:.0f}%",
                    (dim, value),
                    xytext=(0, -11),
                    textcoords="offset points",
                    ha="center",
                    fontsize=6,
                    color=color,
                )
        axis.set_title(op, fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.margins(x=0.08, y=0.12)
        axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_xticks(dims, [str(dim) for dim in dims])
        axis.grid(True, which="both", linewidth=0.3)
        axis.tick_params(labelbottom=True, labelsize=8)
        axis.set_xlabel("D, columns of a row", fontsize=8)
        if number % COLUMNS == 0:
            axis.set_ylabel("G ids/s", fontsize=8)
    axes.flat[0].legend(fontsize=8)
    figure.suptitle(f"{title}: reached (dots, % of the limit) against the op's own limit (dashes)")
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("rows", type=Path, help="rows of steps.py, a JSON line each")
    arguments.add_argument("image", type=Path, help="PNG to write")
    arguments.add_argument("--title", default="GPU", help="such as the device's name")
    options = arguments.parse_args()
    if not draw(read_rows(options.rows), options.title, options.image):
        raise SystemExit(f"{options.rows} has no row with a limit: run experiments.py first")


if __name__ == "__main__":
    main()
