"""Write clicks for ``python -m torch_dynemb plan --replay``: ids that drift, times and labels.

They are the samples of the tutorial's planted model (``tutorials/dlrm/job/planted.py``): 26 columns
with Criteo's cardinalities, in which categories change places all the time, and a label. The column
of time has a day in every hundredth part of the lines.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common.command import positive
from common.progress import progress

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tutorials.dlrm.data import MISSING_ID
from tutorials.dlrm.job.planted import CHUNK, PlantedConfig, PlantedModel

DAYS, DAY_S = 100, 86_400


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT.parquet")
    parser.add_argument("--lines", type=positive, default=1_000_000, help="default: 1,000,000")
    given = parser.parse_args()
    model = PlantedModel(PlantedConfig(samples=given.lines))
    writer = None
    for begin in progress(range(0, given.lines, CHUNK), "chunks"):
        end = min(begin + CHUNK, given.lines)
        samples = model.draw(begin, end)
        seconds = np.arange(begin, end) * DAYS * DAY_S // given.lines
        columns = {"label": samples.labels.astype(np.int8), "time": seconds}
        for number, ids in enumerate(samples.ids, start=1):
            columns[f"C{number}"] = pa.array(ids, mask=ids == MISSING_ID)
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(given.out, table.schema, compression="zstd")
        writer.write_table(table)
    if writer is not None:
        writer.close()


if __name__ == "__main__":
    main()
