"""Fetch the frameworks of other projects: ``python tests/programs/fetch.py``.

``build/programs`` becomes a virtual environment that also sees the packages of this Python, so that
torch is not fetched again and this environment stays as it is. `make programs` calls this. Ray gets
an environment of its own below it, which its tests make if it is missing. FuxiCTR and TorchEasyRec
share another one. No index has TorchEasyRec, nor the models of FuxiCTR: their sources come from
GitHub, or from the URL that an argument gives in its place.
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
RANKING_PYTHON = FOLDER / "ranking" / "bin" / "python"
CLONES = FOLDER / "clones"
# RecBole imports ray, and that pkg_resources, which setuptools had until 80
PACKAGES = (
    "recbole==1.2.1",
    "setuptools<81",
    "lightning==2.6.6",
    "accelerate==1.15.0",
    "transformers==5.24.0",
)
# apart from RecBole, which wants a ray of 2023 that NumPy 2 cannot import
RAY_PACKAGES = ("ray[serve,train]==2.60.0",)
# what FuxiCTR and TorchEasyRec import, and the compiler of TorchEasyRec's messages
RANKING_PACKAGES = (
    "alibabacloud_credentials==1.0.8",
    "anytree==2.13.0",
    "confluent-kafka==2.12.1",
    "grpcio-tools==1.62.3",
    "h5py==3.16.0",
    "keras_preprocessing==1.1.2",
    "polars==1.44.2",
    "pyodps==0.12.5.1",
    "pyyaml==6.0.4",
    "scikit-learn==1.9.1",
    "tensorboard==2.20.0",
    "torchmetrics==1.0.3",
)
GITHUB = "https://github.com"
COMMITS = {
    "alibaba/TorchEasyRec": "54cac3165a2adece9a932616463a5b6a2095b0ce",  # version 1.3.16
    "reczoo/FuxiCTR": "0245987fdc1d43c36164ea496a02324885a8557a",  # version 2.3.10
}
DONE = FOLDER / "fetched.txt"
RAY_DONE = FOLDER / "ray" / "fetched.txt"
RANKING_DONE = FOLDER / "ranking" / "fetched.txt"


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
        names = "\n".join(RAY_PACKAGES) + "\n"
        if not RAY_DONE.exists() or RAY_DONE.read_text() != names:
            fetch(RAY_PYTHON, RAY_PACKAGES)
            RAY_DONE.write_text(names)
    return RAY_PYTHON


def fetch_clones(server: str) -> None:
    """Check out what no index has, and compile TorchEasyRec's messages of protocol buffers.

    Args:
        server: URL before the names of repositories.
    """
    for name, commit in COMMITS.items():
        folder = CLONES / name.rpartition("/")[2]
        subprocess.run(["git", "init", "--quiet", folder], check=True)
        git = ["git", "-C", str(folder)]
        fetched = [*git, "fetch", "--quiet", "--depth=1", f"{server}/{name}", commit]
        subprocess.run(fetched, check=True)
        subprocess.run([*git, "checkout", "--quiet", "--force", commit], check=True)
    folder = CLONES / "TorchEasyRec"
    files = [str(file.relative_to(folder)) for file in folder.rglob("*.proto")]
    compiler = [str(RANKING_PYTHON), "-m", "grpc_tools.protoc", "-I.", "--python_out=."]
    subprocess.run([*compiler, *files], cwd=folder, check=True)


if __name__ == "__main__":
    fetch(PYTHON, PACKAGES)
    fetch_ray()
    DONE.write_text("\n".join((*PACKAGES, *RAY_PACKAGES)) + "\n")
    fetch(RANKING_PYTHON, RANKING_PACKAGES)
    fetch_clones(*(sys.argv[1:] or [GITHUB]))
    RANKING_DONE.write_text("\n".join((*RANKING_PACKAGES, *COMMITS.values())) + "\n")
