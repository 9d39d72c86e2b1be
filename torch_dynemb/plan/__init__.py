"""Sizes of tables, planned from a sample of ids: ``python -m torch_dynemb plan --help``."""

from torch_dynemb.plan.counting import IdCounter, IdCounts
from torch_dynemb.plan.growth import DistinctIds, distinct_ids

__all__ = ["DistinctIds", "IdCounter", "IdCounts", "distinct_ids"]
