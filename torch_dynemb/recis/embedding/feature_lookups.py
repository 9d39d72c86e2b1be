"""Lookups of many features in few tables; shared by trained and read-only engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_dynemb.argument_checks import described
from torch_dynemb.distributed.ranks import RankGroup
from torch_dynemb.recis.embedding.bags import bags_of, custom_scores_of
from torch_dynemb.recis.embedding.joint_lookup import JointLookup, Request, Runtime, fail_lookup
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
        """Prepare the lookups of all features; those over several ranks start to send ids.

        If the input of one rank is wrong, all ranks raise its error; compiled code raises alone.
        """
        try:
            requests = self._requests(input_features)
        except Exception as error:
            for table, _ in self._lookups:  # the others start with the first one
                fail_lookup(self._table(table), self._ranks[table], error)
            raise
        lookups = [
            (
                names,
                JointLookup(self._table(key[0]), self._runtimes[key], request, self._ranks[key[0]]),
            )
            for (key, names), request in zip(self._lookups.items(), requests, strict=True)
        ]
        passed = {k: v for k, v in input_features.items() if k not in self._features}
        return PreparedLookup(lookups, passed)

    def _table(self, name: str) -> HashTable | FrozenHashTable:
        table = self.tables[name]
        assert isinstance(table, HashTable | FrozenHashTable)
        return table

    def _requests(self, input_features: Mapping[str, Any]) -> list[list[Request]]:
        """Check the input and return the requests of each lookup."""
        if not isinstance(input_features, Mapping):
            raise TypeError(
                f"EmbeddingEngine: input_features is {described(input_features)}, expected a dict "
                "of ids by feature name"
            )
        learns = self.training and torch.is_grad_enabled()
        sources = [feature.option.score_from for feature in self._features.values() if learns]
        needed = dict.fromkeys([*self._features, *(name for name in sources if name is not None)])
        missing = [name for name in needed if name not in input_features]
        if missing:
            raise KeyError(
                f"EmbeddingEngine: input_features lacks {missing}; it has {list(input_features)}"
            )
        of_lookups = []
        for (table, _), names in self._lookups.items():
            hash_table = self._table(table)
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
                    scores = custom_scores_of(
                        f"EmbeddingEngine: feature {option.score_from!r}",
                        input_features[option.score_from],
                        bags,
                        decays=policy.combine == "decayed_sum",
                    )
                requests.append(Request(child, bags, option.combiner_kwargs, scores))
            of_lookups.append(requests)
        return of_lookups


__all__ = ["FeatureLookup", "FeatureLookups"]
