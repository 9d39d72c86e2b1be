"""RaggedTensor: a tensor with inner dimensions of different length in each row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import described
from torch_dynemb.recis.ragged.checks import check_ragged, remedy
from torch_dynemb.recis.ragged.offsets import as_int64
from torch_dynemb.recis.ragged.other_forms import keyed_jagged, parts_of_nested, parts_of_sparse
from torch_dynemb.recis.ragged.padding import check_padded_size, padded_sizes
from torch_dynemb.recis.ragged.places import Side, dense_places

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class RaggedTensor:
    """Values with one tensor of offsets for each ragged dimension, outermost first.

    Row r of dimension d has the elements from ``offsets[d][r]`` to ``offsets[d][r + 1]`` of the
    next dimension, or of ``values`` for the last one. A RaggedTensor is immutable: methods return
    new ones. It is a pytree node, so ``torch.compile`` and ``torch.export`` take it as input and
    output.

    Args:
        values: [N] or [N, ...].
        offsets: int64 or int32 [rows + 1] each, ascending from 0 to the number of rows of the next
            dimension, or to N. A tensor stands for a list of one.
        weight: float [N], a weight for every value, or None.
        dense_shape: size of every dimension but those of a single value, with -1 for that of the
            longest row; default: -1 for all ragged ones.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices do not match. On the CPU also offsets that
            decrease, or do not go from 0 to the number of elements that they divide; on a GPU a
            device assertion reports those.

    Example:
        >>> clicks = RaggedTensor(torch.tensor([7, 8, 9]), torch.tensor([0, 2, 2, 3]))
        >>> clicks.shape
        (3, 2)
        >>> clicks.to_dense(-1)
        tensor([[ 7,  8],
                [-1, -1],
                [ 9, -1]])
    """

    def __init__(
        self,
        values: Tensor,
        offsets: Tensor | Sequence[Tensor],
        weight: Tensor | None = None,
        dense_shape: Sequence[int] | None = None,
    ) -> None:
        self._values = values
        array = hasattr(offsets, "__array_interface__")
        if isinstance(offsets, str) or array or not isinstance(offsets, Tensor | Iterable):
            raise TypeError(
                f"RaggedTensor: offsets is {described(offsets)}, expected a Tensor or a list of "
                f"them{remedy(offsets)}"
            )
        self._offsets = [offsets] if isinstance(offsets, Tensor) else list(offsets)
        self._weight = weight
        self._dense_shape = None if dense_shape is None else tuple(dense_shape)
        self._unpadded: list[Tensor] | None = None
        self._pad_side: Side = "right"
        check_ragged(values, self._offsets, weight, self._dense_shape)

    @classmethod
    def _of_parts(
        cls,
        values: Tensor,
        offsets: Sequence[Tensor],
        weight: Tensor | None,
        dense_shape: tuple[int, ...] | None = None,
    ) -> RaggedTensor:
        """Return a tensor of parts that are known to match."""
        ragged = cls.__new__(cls)
        ragged._values, ragged._offsets, ragged._weight = values, list(offsets), weight
        ragged._dense_shape = dense_shape
        ragged._unpadded, ragged._pad_side = None, "right"
        return ragged

    # -- parts and sizes -------------------------------------------------------------------------

    def values(self) -> Tensor:
        """Return all values, [N, ...]."""
        return self._values

    def offsets(self) -> list[Tensor]:
        """Return offsets by ragged dimension, outermost first."""
        return list(self._offsets)

    def weight(self) -> Tensor | None:
        """Return weights of the values, [N], or None."""
        return self._weight

    def lengths(self, dim: int = -1) -> Tensor:
        """Return the lengths of the rows of a ragged dimension.

        Args:
            dim: number of the ragged dimension, 0 for the outermost; default: the innermost.

        Returns:
            Of the dtype of the offsets, [rows].
        """
        return self._offsets[dim].diff()

    def with_values(self, values: Tensor) -> RaggedTensor:
        """Return the same rows with other values.

        Args:
            values: [N, ...], on the same device.

        Raises:
            ValueError: another number of values, or another device.
        """
        if values.shape[:1] != self._values.shape[:1] or values.device != self.device:
            raise ValueError(
                f"with_values: values has shape {tuple(values.shape)} on {values.device}, expected "
                f"{self._values.shape[0]} values on {self.device}"
            )
        return self._like(values, self._offsets, self._weight)

    def with_weight(self, weight: Tensor | None) -> RaggedTensor:
        """Return the same values with other weights, or none.

        Args:
            weight: float [N], or None.

        Raises:
            TypeError, ValueError: as the constructor.
        """
        checked = RaggedTensor(self._values, self._offsets, weight, self._dense_shape)
        return self._like(self._values, self._offsets, checked._weight)

    def _like(
        self, values: Tensor, offsets: Sequence[Tensor], weight: Tensor | None
    ) -> RaggedTensor:
        like = self._of_parts(values, offsets, weight, self._dense_shape)
        like._unpadded, like._pad_side = self._unpadded, self._pad_side
        return like

    @property
    def device(self) -> torch.device:
        """Device of all parts."""
        return self._values.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self._values.dtype

    @property
    def dim(self) -> int:
        """Number of dimensions, including those of a single value."""
        return len(self._offsets) + self._values.dim()

    def get_shape(self, dim: int) -> int:
        """Return the size of a dimension: rows of the first, the longest row of a ragged one.

        Synchronizes a GPU unless ``dense_shape`` has the size.

        Args:
            dim: from 0, the rows; negative ones count from the last.

        Raises:
            IndexError: ``dim`` is out of range.
        """
        dim = range(self.dim)[dim]
        depth = len(self._offsets)
        if dim > depth:
            return self._values.shape[dim - depth]
        if self._dense_shape is not None and self._dense_shape[dim] != -1:
            return self._dense_shape[dim]
        if dim == 0:
            return self._offsets[0].shape[0] - 1
        lengths = self._offsets[dim - 1].diff()
        return int(lengths.max()) if lengths.shape[0] > 0 else 0

    def real_shape(self, start: int = 0, end: int | None = None) -> tuple[int, ...]:
        """Return sizes of some of the dimensions, as from :meth:`get_shape`.

        Args:
            start: the first dimension.
            end: the dimension after the last; default: all from ``start`` on.
        """
        return tuple(self.get_shape(d) for d in range(self.dim)[start:end])

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of all dimensions: those of :meth:`to_dense`."""
        return self.real_shape()

    def size(self) -> tuple[int, ...]:
        """Return ``shape``."""
        return self.real_shape()

    @property
    def max_length(self) -> int:
        """Length of the longest row of the innermost ragged dimension."""
        return self.get_shape(len(self._offsets))

    def __len__(self) -> int:
        return self._offsets[0].shape[0] - 1

    def __repr__(self) -> str:
        return (
            f"RaggedTensor(values={self._values}, offsets={self._offsets}, weight={self._weight})"
        )

    # -- copies ----------------------------------------------------------------------------------

    def _map(self, values: Any, others: Any) -> RaggedTensor:
        moved = self._like(
            values(self._values),
            [others(offsets) for offsets in self._offsets],
            None if self._weight is None else others(self._weight),
        )
        if self._unpadded is not None:
            moved._unpadded = [others(offsets) for offsets in self._unpadded]
        return moved

    def to(self, *args: Any, **kwargs: Any) -> RaggedTensor:
        """Convert as ``Tensor.to``: a device applies to all parts, a dtype to the values alone.

        Args:
            *args: as ``Tensor.to`` takes them.
            **kwargs: as ``Tensor.to`` takes them.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self._map(
            lambda t: t.to(device=device, dtype=dtype, non_blocking=non_blocking),
            lambda t: t.to(device=device, non_blocking=non_blocking),
        )

    def cuda(
        self, device: int | torch.device | None = None, non_blocking: bool = False
    ) -> RaggedTensor:
        """Copy to a GPU.

        Args:
            device: default: the current one.
            non_blocking: whether the host may go on before the copy is done.
        """
        return self._map(
            lambda t: t.cuda(device, non_blocking), lambda t: t.cuda(device, non_blocking)
        )

    def cpu(self) -> RaggedTensor:
        """Copy to the CPU."""
        return self.to("cpu")

    def pin_memory(self) -> RaggedTensor:
        """Copy to page-locked memory, from which copies to a GPU do not block."""
        return self._map(Tensor.pin_memory, Tensor.pin_memory)

    def clone(self) -> RaggedTensor:
        """Return a copy that shares no memory."""
        return self._map(torch.clone, torch.clone)

    def detach(self) -> RaggedTensor:
        """Return values and weights without gradient history."""
        return self._map(Tensor.detach, Tensor.detach)

    # -- dense -----------------------------------------------------------------------------------

    def to_dense(self, default_value: float = 0.0) -> Tensor:
        """Convert to a dense tensor of ``shape``; ``default_value`` fills shorter rows.

        Differentiable. Synchronizes a GPU unless ``dense_shape`` has no -1.

        Args:
            default_value: a number in the range of the dtype.

        Returns:
            Of the values' dtype, of ``shape``.

        Raises:
            RuntimeError: a row is longer than its size in ``dense_shape``.
        """
        sizes = self.real_shape(1, len(self._offsets) + 1)
        if self._values.dim() == 1:
            return ops.ragged_to_dense(
                [self._values.contiguous()],
                [[as_int64(offsets) for offsets in self._offsets]],
                lengths=[list(sizes)],
                padding_value=default_value,
            )[0]
        inner = self._values.shape[1:]
        flat = self._values.new_full((len(self) * math.prod(sizes), *inner), default_value)
        places = dense_places(self._offsets, sizes, "right")
        return flat.index_put((places,), self._values).reshape(len(self), *sizes, *inner)

    @classmethod
    def from_dense(
        cls, dense: Tensor, check_invalid: bool = False, invalid_value: float = 0
    ) -> RaggedTensor:
        """Return the rows of a tensor [n0, ..., nk], k at least 1.

        Args:
            dense: of any dtype.
            check_invalid: remove the trailing run of ``invalid_value`` from each row.
            invalid_value: padding at the ends of rows.

        Raises:
            ValueError: ``dense`` has less than 2 dimensions.
        """
        if dense.dim() < 2:
            raise ValueError(
                f"from_dense: dense has shape {tuple(dense.shape)}, expected at least 2 dimensions"
            )
        ragged = ops.dense_to_ragged(
            [dense.contiguous()], invalid_value=invalid_value if check_invalid else None
        )[0]
        return cls._of_parts(ragged.values, ragged.offsets, None, tuple(dense.shape))

    def to_sparse(self) -> Tensor:
        """Convert to a coalesced sparse COO tensor of ``shape``; shorter rows have fewer elements.

        Raises:
            ValueError: values have more than 1 dimension.
        """
        self._check_plain("to_sparse")
        return ops.ragged_to_sparse(
            [self._values.contiguous()],
            [[as_int64(offsets) for offsets in self._offsets]],
            lengths=[list(self.real_shape(1))],
        )[0]

    @classmethod
    def from_sparse(cls, sparse: Tensor) -> RaggedTensor:
        """Return the elements of a sparse COO tensor [n0, ..., nk], row by row, without gaps.

        Args:
            sparse: k is at least 1; of any dtype.

        Raises:
            ValueError: ``sparse`` has less than 2 sparse dimensions.
        """
        values, offsets, sizes = parts_of_sparse(sparse)
        return cls._of_parts(values, offsets, None, sizes)

    def _check_plain(self, method: str) -> None:
        if self._values.dim() != 1:
            raise ValueError(
                f"{method}: values has shape {tuple(self._values.shape)}, expected 1 dimension"
            )

    # -- padding ---------------------------------------------------------------------------------

    def pad(
        self,
        lengths: int | Sequence[int] | None = None,
        value: float = 0,
        side: Side = "right",
    ) -> RaggedTensor:
        """Pad all rows of a dimension to the length of the longest, for sequence models.

        Args:
            lengths: of the ragged dimensions, or of the innermost; default: the longest row's.
            value: of the added elements; their weight is 0.
            side: side of the innermost rows that is padded.

        Returns:
            A tensor with the values ``to_dense().flatten()``; its :meth:`unpad` restores this one.

        Raises:
            ValueError: a row is longer than ``lengths``, ``side`` is unknown, or the result needs
                more memory than is available.
        """
        self._check_plain("pad")
        if side not in ("left", "right"):
            raise ValueError(f"pad: side is {side!r}, expected 'left' or 'right'")
        sizes = padded_sizes(lengths, self.real_shape(1))
        total = len(self) * math.prod(sizes)
        check_padded_size(lengths, len(self), total, self._values, self._weight)
        places = dense_places(self._offsets, sizes, side)
        values = self._values.new_full((total,), value).index_put((places,), self._values)
        weight = self._weight
        if weight is not None:
            weight = weight.new_zeros(total).index_put((places,), weight)
        rows = itertools.accumulate(sizes, int.__mul__, initial=len(self))
        offsets = [
            torch.arange(n + 1, dtype=old.dtype, device=self.device) * size
            for n, size, old in zip(rows, sizes, self._offsets, strict=False)
        ]
        padded = self._of_parts(values, offsets, weight, (len(self), *sizes))
        padded._unpadded, padded._pad_side = list(self._offsets), side
        return padded

    def unpad(self) -> RaggedTensor:
        """Remove the padding of :meth:`pad`, also after ``with_values``.

        Raises:
            ValueError: the tensor was not made by :meth:`pad`.
        """
        if self._unpadded is None:
            raise ValueError("unpad: the tensor has no padding: call pad() first")
        sizes = self.real_shape(1, len(self._offsets) + 1)
        places = dense_places(self._unpadded, sizes, self._pad_side)
        return self._of_parts(
            self._values[places],
            self._unpadded,
            None if self._weight is None else self._weight[places],
        )

    # -- other ragged tensors --------------------------------------------------------------------

    def _check_flat(self, method: str) -> None:
        if len(self._offsets) != 1:
            raise ValueError(
                f"{method}: the tensor has {len(self._offsets)} ragged dimensions, expected 1"
            )

    def to_nested(self) -> Tensor:
        """Convert to a jagged NestedTensor of the values; weights are dropped.

        Raises:
            ValueError: more than one ragged dimension.
        """
        self._check_flat("to_nested")
        return torch.nested.nested_tensor_from_jagged(self._values, self._offsets[0])

    @classmethod
    def from_nested(cls, nested: Tensor, weight: Tensor | None = None) -> RaggedTensor:
        """Return the values of a jagged NestedTensor.

        Args:
            nested: of any dtype.
            weight: float [N], a weight for every value, or None.

        Raises:
            ValueError: another layout, or another ragged dimension than the second.
        """
        values, offsets = parts_of_nested(nested)
        return cls(values, offsets, weight)

    def to_jagged(self) -> JaggedTensor:
        """Convert to TorchRec's JaggedTensor.

        Raises:
            ValueError: more than one ragged dimension.
        """
        from torchrec.sparse.jagged_tensor import JaggedTensor

        self._check_flat("to_jagged")
        return JaggedTensor(self._values, weights=self._weight, offsets=self._offsets[0])

    @classmethod
    def from_jagged(cls, jagged: JaggedTensor) -> RaggedTensor:
        """Return the rows of TorchRec's JaggedTensor.

        Args:
            jagged: with or without weights.
        """
        return cls(jagged.values(), jagged.offsets(), jagged.weights_or_none())

    @staticmethod
    def to_keyed_jagged(features: Mapping[str, RaggedTensor]) -> KeyedJaggedTensor:
        """Return TorchRec's KeyedJaggedTensor of several features with one ragged dimension each.

        Args:
            features: by name; with weights for all, or for none.

        Raises:
            ValueError: features differ in their number of rows, or in whether they have weights.
        """
        for name, feature in features.items():
            feature._check_flat(f"to_keyed_jagged: feature {name!r}")
        parts = list(features.values())
        return keyed_jagged(
            list(features),
            [feature.values() for feature in parts],
            [feature.lengths() for feature in parts],
            [feature.weight() for feature in parts],
        )

    @classmethod
    def from_keyed_jagged(cls, features: KeyedJaggedTensor) -> dict[str, RaggedTensor]:
        """Return the features of TorchRec's KeyedJaggedTensor by name.

        Args:
            features: with or without weights.
        """
        return {name: cls.from_jagged(jagged) for name, jagged in features.to_dict().items()}


__all__ = ["RaggedTensor"]
