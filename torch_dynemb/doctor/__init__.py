"""Check of this machine for the library: ``python -m torch_dynemb doctor``."""

from torch_dynemb.doctor.facts import Facts, gather
from torch_dynemb.doctor.findings import Finding, findings

__all__ = ["Facts", "Finding", "findings", "gather"]
