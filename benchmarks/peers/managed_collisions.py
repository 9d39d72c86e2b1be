"""TorchRec's managed collisions (MCH): ids to the rows of a static table, with eviction."""

from __future__ import annotations

import importlib.util
import warnings

import torch
from peers.build import MissingPackageError
from torch import Tensor

FEATURE = "ids"


class ManagedCollisions:
    """An ``MCHManagedCollisionModule`` in training.

    It knows ``rows - 1`` ids, in a sorted list. The lookups of ``interval`` steps are collected;
    then the ids that rank highest, old and new, stay, and the list is sorted again. All other ids
    are looked up as the last row.

    Args:
        policy: ``LRU``, ``LFU`` or ``DistanceLFU``.
        rows: rows of the table (``zch_size``).
        interval: steps from eviction to eviction.

    Raises:
        MissingPackageError: torchrec is not installed.
    """

    def __init__(self, policy: str, rows: int, *, interval: int) -> None:
        if importlib.util.find_spec("torchrec") is None:
            raise MissingPackageError(
                "torchrec is not installed, a peer of eviction. `make bench-peers` installs it "
                "for CPU builds of torch, too"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchrec.modules import mc_modules
            from torchrec.sparse.jagged_tensor import JaggedTensor
        self._jagged = JaggedTensor
        self._module = mc_modules.MCHManagedCollisionModule(
            zch_size=rows,
            device=torch.device("cpu"),
            eviction_policy=getattr(mc_modules, f"{policy}_EvictionPolicy")(),
            eviction_interval=interval,
        ).train()
        self.shared_row = rows - 1

    def known(self, ids: Tensor) -> Tensor:
        """Return bool [N]: which ids have a row of their own; nothing changes.

        Args:
            ids: int64 [N].
        """
        batch = self._jagged(values=ids, lengths=torch.ones_like(ids))
        features = self._module.preprocess({FEATURE: batch})
        return self._module.remap(features)[FEATURE].values() != self.shared_row

    def look_up(self, ids: Tensor) -> Tensor:
        """Return rows of ids, int64 [N], of one training step; evict at every ``interval``-th call.

        Args:
            ids: int64 [N], the same N in every call: the first one sizes the history.

        Returns:
            int64 [N], 0 to ``rows - 1``.
        """
        batch = self._jagged(values=ids, lengths=torch.ones_like(ids))
        return self._module({FEATURE: batch})[FEATURE].values()
