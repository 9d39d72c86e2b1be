"""Ops that select fields of the input, with which features begin."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, flag, integer, text
from torch_dynemb.recis.arguments import entries
from torch_dynemb.recis.feature_ops.feature_op import FeatureOp
from torch_dynemb.recis.feature_ops.values import (
    Value,
    check_dtype,
    check_optional_dtype,
    check_value,
)
from torch_dynemb.recis.ragged.tensor import RaggedTensor


class SelectField(FeatureOp):
    """Field of the input.

    Args:
        name: of the field.
        dtype: required dtype of its values; default: any.
        dim: required size of its last dimension. For a RaggedTensor, the maximum length of its
            innermost rows; the check waits for a GPU.
        from_dict: False: the input is the field itself instead of a dict.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``dim`` is negative.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        dim: int | None = None,
        from_dict: bool = True,
    ) -> None:
        super().__init__()
        self.name = text("SelectField: name", name)
        check_optional_dtype("SelectField", dtype)
        self.dtype = dtype
        self.dim = None if dim is None else integer("SelectField: dim", dim, least=0)
        self.from_dict = flag("SelectField: from_dict", from_dict)

    def config(self) -> Hashable:
        return self.name, self.dtype, self.dim, self.from_dict

    def check(self, owner: str, value: Any) -> None:
        if self.from_dict:
            if not isinstance(value, Mapping):
                raise TypeError(f"{owner}: the input is a {type(value).__name__}, expected a dict")
            if self.name not in value:
                raise KeyError(
                    f"{owner}: the input has fields {list(value)}, expected field {self.name!r}"
                )
        field = self._field(value)
        check_value(f"{owner}: field {self.name!r}", field)
        if self.dtype is not None:
            check_dtype(f"{owner}: field {self.name!r}", field, (self.dtype,))
        if self.dim is not None:
            ragged = isinstance(field, RaggedTensor)
            size = field.max_length if ragged else (field.shape[-1] if field.dim() > 0 else 0)
            if size > self.dim or (not ragged and size != self.dim):
                raise ValueError(
                    f"{owner}: field {self.name!r} has a row of {size}, expected "
                    f"{'at most ' if ragged else ''}dim, {self.dim}"
                )

    def _field(self, value: Any) -> Any:
        return value[self.name] if self.from_dict else value

    def _select(self, value: Any) -> Any:
        field = self._field(value)
        if self.dim is None or isinstance(field, Tensor):
            return field
        shape = (*([-1] * len(field.offsets())), self.dim)
        return RaggedTensor._of_parts(field.values(), field.offsets(), field.weight(), shape)

    @classmethod
    def run(cls, ops_: Sequence[SelectField], inputs: Sequence[Any]) -> list[Value]:
        return [op._select(value) for op, value in zip(ops_, inputs, strict=True)]


class SelectFields(FeatureOp):
    """Several fields of the input as a list, for :class:`FeatureCross`.

    Args:
        input_list: the SelectField of each field.

    Raises:
        TypeError: ``input_list`` is not a list of SelectField.
    """

    def __init__(self, input_list: Sequence[SelectField]) -> None:
        super().__init__()
        self.input_list: list[SelectField] = []
        given = entries("SelectFields: input_list", input_list, "a list of SelectField")
        for i, field in enumerate(given):
            if not isinstance(field, SelectField):
                raise TypeError(
                    f"SelectFields: input_list[{i}] is {described(field)}, expected a SelectField"
                )
            self.input_list.append(field)

    def config(self) -> Hashable:
        return tuple(op.config() for op in self.input_list)

    def check(self, owner: str, value: Any) -> None:
        for op in self.input_list:
            op.check(owner, value)

    @classmethod
    def run(cls, ops_: Sequence[SelectFields], inputs: Sequence[Any]) -> list[list[Value]]:
        return [
            [field._select(value) for field in op.input_list]
            for op, value in zip(ops_, inputs, strict=True)
        ]


__all__ = ["SelectField", "SelectFields"]
