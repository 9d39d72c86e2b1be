"""RecIS's FeatureEngine: many features, declared as chains of ops, computed in few calls."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, cast

from torch import nn

from torch_dynemb.argument_checks import described, text
from torch_dynemb.recis.arguments import entries
from torch_dynemb.recis.feature_ops.feature_op import FeatureOp
from torch_dynemb.recis.feature_ops.fields import SelectField, SelectFields


class Feature:
    """Name and chain of ops; the first op is a SelectField or SelectFields.

    Args:
        name: of the result.

    Raises:
        TypeError: ``name`` is not a str.

    Example:
        >>> from torch_dynemb.recis.feature_ops import Mod
        >>> Feature("user").add_op(SelectField("user_id")).add_op(Mod(1000)).name
        'user'
    """

    def __init__(self, name: str) -> None:
        self.name = text("Feature: name", name)
        self.ops: list[FeatureOp] = []

    def add_op(self, op: FeatureOp) -> Feature:
        """Append an op; return the feature.

        Args:
            op: one of torch_dynemb's or a custom one.

        Raises:
            TypeError: ``op`` is not a FeatureOp.
        """
        if not isinstance(op, FeatureOp):
            raise TypeError(
                f"feature {self.name!r}: op is a {type(op).__name__}, expected a FeatureOp"
            )
        self.ops.append(op)
        return self


class _Node(NamedTuple):
    """Op on an input.

    Attributes:
        source: number of the node that produces its input; -1: the engine's input.
        owner: name of the feature in errors.
    """

    source: int
    owner: str


class FeatureEngine(nn.Module):
    """Engine that computes features from fields.

    Chains are merged once, when the engine is made: a common prefix of equal ops is computed once.
    Ops of one class at the same distance from the input become one call of a fused kernel.

    Inputs are Tensors or RaggedTensors, which stay unchanged, as does the dict. Ops with a result
    size that depends on values (SequenceTruncate, FeatureCross) wait for a GPU; all others do not.

    Args:
        feature_list: features to compute.

    Raises:
        TypeError: ``feature_list`` is not a list of :class:`Feature`.
        ValueError: two features have one name, or one does not begin with a SelectField.

    Example:
        >>> import torch
        >>> from torch_dynemb.recis.feature_ops import Bucketize, Mod
        >>> engine = FeatureEngine([
        ...     Feature("user").add_op(SelectField("user_id")).add_op(Mod(1000)),
        ...     Feature("price").add_op(SelectField("price")).add_op(Bucketize([1, 10])),
        ... ])
        >>> data = {"user_id": torch.tensor([2024]), "price": torch.tensor([9.5])}
        >>> engine(data | {"label": torch.ones(1)}, remain_no_use_data=False)
        {'user': tensor([24]), 'price': tensor([1])}
    """

    def __init__(self, feature_list: Iterable[Feature]) -> None:
        super().__init__()
        self.ops = nn.ModuleList()  # by number of the node
        self._nodes: list[_Node] = []
        self._steps: list[tuple[type[FeatureOp], list[int]]] = []
        self._results: dict[str, int] = {}
        known: dict[Hashable, int] = {}
        levels: list[dict[type[FeatureOp], list[int]]] = []
        for i, feature in enumerate(
            entries("FeatureEngine: feature_list", feature_list, "a list of Feature")
        ):
            if not isinstance(feature, Feature):
                raise TypeError(
                    f"FeatureEngine: feature_list[{i}] is {described(feature)}, expected a Feature"
                )
            if feature.name in self._results:
                raise ValueError(f"feature {feature.name!r} is given twice: names are unique")
            self._check_beginning(feature)
            node = -1
            for level, op in enumerate(feature.ops):
                key = (type(op), op.config(), node)
                if key not in known:
                    known[key] = len(self._nodes)
                    self._nodes.append(_Node(node, f"feature {feature.name!r}"))
                    self.ops.append(op)
                    if level == len(levels):
                        levels.append({})
                    levels[level].setdefault(type(op), []).append(known[key])
                node = known[key]
            self._results[feature.name] = node
        for of_level in levels:
            self._steps.extend(of_level.items())

    @staticmethod
    def _check_beginning(feature: Feature) -> None:
        selects = [isinstance(op, (SelectField, SelectFields)) for op in feature.ops]
        if not feature.ops or not selects[0] or any(selects[1:]):
            names = [type(op).__name__ for op in feature.ops]
            raise ValueError(
                f"feature {feature.name!r} has the ops {names}, expected a SelectField or "
                "SelectFields first, and nowhere else"
            )

    def forward(self, data: Any, remain_no_use_data: bool = True) -> dict[str, Any]:
        """Return results by feature; an op that returns a dict gives ``f"{feature}_{key}"``.

        Args:
            data: fields by name.
            remain_no_use_data: also return fields with names that no result has.

        Returns:
            Tensors and RaggedTensors by name.

        Raises:
            KeyError, TypeError, ValueError: a field is missing, or an op rejects it; the message
                names a feature. Or two features give results of one name.
        """
        values: list[Any] = [None] * len(self._nodes)
        for kind, numbers in self._steps:
            ops, inputs = [], []
            for number in numbers:
                node, op = self._nodes[number], cast(FeatureOp, self.ops[number])
                value = data if node.source < 0 else values[node.source]
                op.check(node.owner, value)
                ops.append(op)
                inputs.append(value)
            for number, value in zip(numbers, kind.run(ops, inputs), strict=True):
                values[number] = value
        results: dict[str, Any] = {}
        for name, number in self._results.items():
            value = values[number]
            named = (
                {f"{name}_{key}": part for key, part in value.items()}
                if isinstance(value, dict)
                else {name: value}
            )
            for key, part in named.items():
                if key in results:
                    raise ValueError(f"feature {name!r}: two features give a result {key!r}")
                results[key] = part
        if remain_no_use_data and isinstance(data, dict):
            for key, part in data.items():
                results.setdefault(key, part)
        return results


__all__ = ["Feature", "FeatureEngine"]
