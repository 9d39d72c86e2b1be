"""Fetch the frameworks of other projects: ``python tests/programs/fetch.py``.

``build/programs`` becomes a virtual environment that also sees the packages of this Python, so that
torch is not fetched again and this environment stays as it is. `make programs` calls this. Ray gets
an environment of its own below it, which its tests make if it is missing.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "programs"
PYTHON = FOLDER / "bin" / "python"
RAY_PYTHON = FOLDER / "ray" / "bin" / "python"
# RecBole imports ray, and that pkg_resources, which setuptools had until 80
PACKAGES = (
    "recbole==1.2.1",
    "setuptools<81",
    "lightning==2.6.6",
    "accelerate==1.15.0",
    "transformers==5.24.0",
)
# apart from RecBole, which wants a ray of 2023 that NumPy 2 cannot import
RAY_PACKAGES = ("ray[train]==2.60.0",)
DONE = FOLDER / "fetched.txt"
RAY_DONE = FOLDER / "ray" / "fetched.txt"


def fetch(python: Path, packages: tuple[str, ...]) -> None:
    """Make an environment anew and install packages.

    Args:
        python: of the environment.
        packages: with their versions.
    """
    folder = python.parents[1]
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    site = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(site, "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "--quiet", *packages], check=True)


def fetch_ray() -> Path:
    """Make the environment of Ray if it is missing.

    Returns:
        Its Python.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER.parent / "ray.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test may be at it
        if not RAY_DONE.exists():
            fetch(RAY_PYTHON, RAY_PACKAGES)
            RAY_DONE.write_text("\n".join(RAY_PACKAGES) + "\n")
    return RAY_PYTHON


if __name__ == "__main__":
    fetch(PYTHON, PACKAGES)
    fetch_ray()
    DONE.write_text("\n".join((*PACKAGES, *RAY_PACKAGES)) + "\n")
