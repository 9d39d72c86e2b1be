"""Lookups of many features in few tables; shared by trained and read-only engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_dynemb.argument_checks import described
from torch_dynemb.distributed.ranks import RankGroup
from torch_dynemb.recis.embedding.bags import bags_of, scores_of
from torch_dynemb.recis.embedding.joint_lookup import JointLookup, Request, Runtime
from torch_dynemb.recis.embedding.options import EmbeddingOption
from torch_dynemb.recis.embedding.prepared import PreparedLookup
from torch_dynemb.recis.tables.frozen_table import FrozenHashTable
from torch_dynemb.recis.tables.hash_table import HashTable


class FeatureLookup(NamedTuple):
    """Table and options of a feature.

    Attributes:
        table: name of the physical table.
        child: number of its logical table there.
        option: of the feature.
    """

    table: str
    child: int
    option: EmbeddingOption


class FeatureLookups(nn.Module):
    """Base of the engines.

    Attributes:
        tables: the physical tables by name.
    """

    tables: nn.ModuleDict
    _features: dict[str, FeatureLookup]
    _ranks: dict[str, RankGroup | None]
    # feature names by table and runtime, in the order of the options, the same on all ranks
    _lookups: dict[tuple[str, str], list[str]]
    _runtimes: dict[tuple[str, str], Runtime]

    def _prepared(self, input_features: Mapping[str, Any]) -> PreparedLookup:
        """Prepare the lookups of all features; those over several ranks start to send ids."""
        if not isinstance(input_features, Mapping):
            raise TypeError(
                f"EmbeddingEngine: input_features is {described(input_features)}, expected a dict "
                "of ids by feature name"
            )
        learns = self.training and torch.is_grad_enabled()
        sources = [of.option.score_from for of in self._features.values() if learns]
        needed = dict.fromkeys([*self._features, *(name for name in sources if name is not None)])
        missing = [name for name in needed if name not in input_features]
        if missing:
            raise KeyError(
                f"EmbeddingEngine: input_features lacks {missing}; it has {list(input_features)}"
            )
        lookups = []
        for key, names in self._lookups.items():
            table, _ = key
            hash_table = self.tables[table]
            assert isinstance(hash_table, HashTable | FrozenHashTable)
            requests = []
            for name in names:
                _, child, option = self._features[name]
                bags = bags_of(
                    f"EmbeddingEngine: feature {name!r}",
                    input_features[name],
                    None,
                    use_weight=option.use_weight,
                )
                scores = None
                if option.score_from is not None and learns and isinstance(hash_table, HashTable):
                    policy = hash_table.group.config.tables[child].policy
                    scores = scores_of(
                        f"EmbeddingEngine: feature {option.score_from!r}",
                        input_features[option.score_from],
                        bags,
                        decays=policy.combine == "decayed_sum",
                    )
                requests.append(Request(child, bags, option.tile_len, scores))
            lookup = JointLookup(hash_table, self._runtimes[key], requests, self._ranks[table])
            lookups.append((names, lookup))
        passed = {k: v for k, v in input_features.items() if k not in self._features}
        return PreparedLookup(lookups, passed)


__all__ = ["FeatureLookup", "FeatureLookups"]
