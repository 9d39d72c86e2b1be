"""Fetch the frameworks of other projects: ``python tests/programs/fetch.py``.

``build/programs`` becomes a virtual environment that also sees the packages of this Python, so that
torch is not fetched again and this environment stays as it is. `make programs` calls this.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "programs"
PYTHON = FOLDER / "bin" / "python"
# RecBole imports ray, and that pkg_resources, which setuptools had until 80
PACKAGES = (
    "recbole==1.2.1",
    "setuptools<81",
    "lightning==2.6.6",
    "accelerate==1.15.0",
    "transformers==5.24.0",
)
DONE = FOLDER / "fetched.txt"


def fetch() -> None:
    """Make the environment anew and install the packages."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", FOLDER], check=True)
    site = sysconfig.get_path("purelib", vars={"base": str(FOLDER)})
    Path(site, "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(PYTHON)]
    subprocess.run([*pip, "install", "--quiet", *PACKAGES], check=True)
    DONE.write_text("\n".join(PACKAGES) + "\n")


if __name__ == "__main__":
    fetch()
