"""Compiles and runs experiments.cu; its measurements are the ceilings that limits.py divides by."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
from pathlib import Path

import setup as build_script
from benchmarks.common.report import Row, RowFile, read_rows
from benchmarks.gpu.limits import Ceilings

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = Path(__file__).resolve().parent / "experiments.cu"
BENCH = "gpu_experiments"


def compile_program(architecture: str) -> Path:
    """Compile experiments.cu, unless that has been done.

    Args:
        architecture: such as ``9.0``.

    Returns:
        The program, in build/gpu.

    Raises:
        FileNotFoundError: nvcc is missing.
        CalledProcessError: nvcc failed; it has said why.
    """
    cuda_root = build_script.find_cuda_root(os.environ)
    if cuda_root is None:
        raise FileNotFoundError(
            "no nvcc in CUDA_HOME, on PATH or in the usual place: experiments.cu needs one"
        )
    number = architecture.replace(".", "")
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    program = ROOT / "build" / "gpu" / f"experiments-sm_{number}-{digest}"
    if not program.is_file():
        program.parent.mkdir(parents=True, exist_ok=True)
        unfinished = program.with_suffix(".part")
        command = [str(cuda_root / "bin" / "nvcc"), "-std=c++17", "-O3", f"-arch=sm_{number}"]
        library = ["-L", str(build_script.cudart_directory(cuda_root))]
        subprocess.run([*command, *library, str(SOURCE), "-o", str(unfinished)], check=True)
        unfinished.replace(program)
    return program


def row_of(line: dict[str, object]) -> Row:
    """Return a line of the program as a row of results."""
    rest = {k: v for k, v in line.items() if k not in ("experiment", "case", "rate", "unit")}
    if line["experiment"] == "device":
        return {"bench": BENCH, "case": "device", "ours_ms": None, "valid": True, **rest}
    footprint = line.get("footprint")
    case = f"{line['experiment']}: {line['case']}"
    if isinstance(footprint, int | float):
        case += f", over {footprint / 2**20:.0f} MiB"
    return {
        "bench": BENCH,
        "case": case,
        "ours_ms": line["median_ms"],
        "peer": None,
        "peer_ms": None,
        "ratio": None,
        "value": line["rate"],
        "unit": line["unit"],
        "valid": True,
        "experiment": line["experiment"],
        **rest,
    }


def ceilings(rows: list[Row]) -> Ceilings | None:
    """Return the best copy, reads from L2, and random 64-byte reads over the largest footprint.

    Args:
        rows: of :func:`row_of`.

    Returns:
        None where one of the three was not measured.
    """
    copies = [row["value"] for row in rows if row.get("experiment") == "copy"]
    reads = [
        row
        for row in rows
        if row.get("experiment") == "random read" and row.get("access_bytes") == 64
    ]
    from_l2 = [row["value"] for row in rows if row.get("experiment") == "L2 read"]
    if not copies or not reads or not from_l2:
        return None
    largest = max(row["footprint"] for row in reads)
    rate = max(row["value"] for row in reads if row["footprint"] == largest)
    return Ceilings(max(copies), rate, max(from_l2))


def read_ceilings(path: Path | None) -> Ceilings | None:
    """Return the ceilings in a file of rows, if it has them."""
    return None if path is None else ceilings(read_rows(path))


def main() -> None:
    import torch

    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rows", type=Path, help="file for the rows, a JSON line each")
    arguments.add_argument("--quick", action="store_true", help="smaller sizes: a check, no result")
    options = arguments.parse_args()
    major, minor = torch.cuda.get_device_capability()
    command = [str(compile_program(f"{major}.{minor}"))] + (["--quick"] if options.quick else [])
    rows = RowFile(options.rows)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            rows.add(row_of(json.loads(line)))
    if process.returncode != 0:
        raise SystemExit(f"experiments.cu ended with status {process.returncode}")


if __name__ == "__main__":
    main()
