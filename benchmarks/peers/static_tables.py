"""Training steps of other tables: FBGEMM, nn.EmbeddingBag + torch.optim, reference kernels."""

from __future__ import annotations

import ctypes
import importlib.util
import warnings
from collections.abc import Callable

import torch
from common.id_streams import distinct_ids
from peers.build import MissingPackageError, build
from torch import Tensor

LEARNING_RATE = 0.01
HASHED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # as in hashed_step.cpp
Step = Callable[[Tensor], object]  # numbers of rows, int64 [batch, bag size] -> one training step


def fbgemm_step(optimizer: str, rows: int, dim: int, grad: Tensor) -> Step:
    """Return a step of FBGEMM's SplitTableBatchedEmbeddingBagsCodegen, update in backward.

    Args:
        optimizer: ``SGD``, ``Adagrad`` or ``RowWiseAdagrad``.
        rows: rows of the table.
        dim: columns of the table.
        grad: float32 [batch, dim], the gradient of the output.

    Returns:
        The step.

    Raises:
        MissingPackageError: fbgemm_gpu is not installed.
    """
    if importlib.util.find_spec("fbgemm_gpu") is None:
        raise MissingPackageError(
            "fbgemm_gpu is not installed, a peer of the training step. Install the version that "
            "fits torch (2.13: pip install fbgemm-gpu-cpu==1.8.0), or `make bench`, which does"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    kinds = {
        "SGD": EmbOptimType.EXACT_SGD,
        "Adagrad": EmbOptimType.EXACT_ADAGRAD,
        "RowWiseAdagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    }
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=kinds[optimizer],
        learning_rate=LEARNING_RATE,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,  # the cheapest: ids are right
    )
    table.init_embedding_weights_uniform(-0.01, 0.01)
    offsets: dict[torch.Size, Tensor] = {}

    def step(numbers: Tensor) -> None:
        if numbers.shape not in offsets:
            offsets[numbers.shape] = torch.arange(0, numbers.numel() + 1, numbers.shape[1])
        table(numbers.reshape(-1), offsets[numbers.shape]).backward(grad)

    return step


def torch_step(optimizer: str, rows: int, dim: int, grad: Tensor) -> Step:
    """Return a step of ``nn.EmbeddingBag(sparse=True)`` and an optimizer of torch.optim.

    Args:
        optimizer: ``SGD``, ``Adagrad`` or ``SparseAdam``.
        rows: rows of the table.
        dim: columns of the table.
        grad: float32 [batch, dim], the gradient of the output.

    Returns:
        The step.
    """
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, but said: no warning
    table = torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True)
    torch.nn.init.uniform_(table.weight, -0.01, 0.01)
    updater = getattr(torch.optim, optimizer)(list(table.parameters()), lr=LEARNING_RATE)

    def step(numbers: Tensor) -> None:
        updater.zero_grad()
        table(numbers).backward(grad)
        updater.step()

    return step


class HashedTable:
    """The table of hashed_step.cpp, with ids of its own.

    Args:
        ids: int64 [rows], distinct.
        dim: columns: 16, 64 or 128.
        squares: whether rows have the state of row-wise Adagrad; without, the update is SGD's.
        dtype: of the rows; of 16 bits, they are rounded to nearest.
        split: whether sums of gradients are written to memory before rows are updated.
    """

    def __init__(
        self,
        ids: Tensor,
        dim: int,
        *,
        squares: bool,
        dtype: torch.dtype = torch.float32,
        split: bool = False,
    ) -> None:
        self._library = ctypes.CDLL(str(build()))
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._library.dynemb_peer_hashed_create.restype = pointer
        self._library.dynemb_peer_hashed_create.argtypes = [pointer, count, count]
        self._library.dynemb_peer_hashed_create.argtypes += [ctypes.c_int, ctypes.c_int]
        self._library.dynemb_peer_hashed_destroy.argtypes = [pointer]
        self._library.dynemb_peer_hashed_weights.restype = pointer
        self._library.dynemb_peer_hashed_weights.argtypes = [pointer]
        self._step = self._library.dynemb_peer_hashed_step
        self._step.argtypes = [pointer, pointer, count, count, pointer, pointer]
        self._step.argtypes += [ctypes.c_float, ctypes.c_int, ctypes.c_int]
        self._table = self._library.dynemb_peer_hashed_create(
            ids.data_ptr(), len(ids), dim, int(squares), HASHED_DTYPES.index(dtype)
        )
        self._shape, self._dtype, self._split = (len(ids), dim), dtype, split

    def __del__(self) -> None:
        self._library.dynemb_peer_hashed_destroy(self._table)

    def weights(self) -> Tensor:
        """Return a copy of the rows, in the order of the ids: [rows, dim]."""
        count = self._shape[0] * self._shape[1] * self._dtype.itemsize
        address = self._library.dynemb_peer_hashed_weights(self._table)
        values = (ctypes.c_char * count).from_address(address)
        return torch.frombuffer(values, dtype=self._dtype).view(self._shape).clone()

    def step(self, ids: Tensor, grad: Tensor) -> Tensor:
        """Train one step.

        Args:
            ids: int64 [batch, bag size], of the table.
            grad: float32 [batch, dim], the gradient of the output.

        Returns:
            The sums of bags, float32 [batch, dim].
        """
        out = torch.empty_like(grad)
        compiled = self._step(
            self._table,
            ids.data_ptr(),
            *ids.shape,
            out.data_ptr(),
            grad.data_ptr(),
            LEARNING_RATE,
            torch.get_num_threads(),
            int(self._split),
        )
        if not compiled:
            raise ValueError(f"dim={grad.shape[1]}: expected 16, 64 or 128, as in hashed_step.cpp")
        return out


def hashed_step(
    optimizer: str,
    rows: int,
    dim: int,
    grad: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    split: bool = False,
) -> Step:
    """Return a step of the kernel in hashed_step.cpp: one probe, one sort, one update of each row.

    Args:
        optimizer: ``SGD`` or ``RowWiseAdagrad``.
        rows: rows of the table, of the ids of numbers 0 to ``rows - 1``.
        dim: columns of the table: 16, 64 or 128.
        grad: float32 [batch, dim], the gradient of the output.
        dtype, split: as for :class:`HashedTable`.

    Returns:
        The step, of ids.
    """
    squares = optimizer == "RowWiseAdagrad"
    table = HashedTable(distinct_ids(0, rows), dim, squares=squares, dtype=dtype, split=split)
    return lambda ids: table.step(ids, grad)


def reference_step(optimizer: str, rows: int, dim: int, grad: Tensor) -> Step:
    """Return a step of the kernel in static_step.cpp: no hash, no sort, no dedupe, no autograd.

    Args:
        optimizer: ``SGD`` or ``RowWiseAdagrad``.
        rows: rows of the table.
        dim: columns of the table: 16, 64 or 128.
        grad: float32 [batch, dim], the gradient of the output.

    Returns:
        The step.
    """
    function = ctypes.CDLL(str(build())).dynemb_peer_static_step
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, count, pointer, count, count, pointer, pointer]
    function.argtypes += [ctypes.c_float, ctypes.c_int]
    weights = torch.empty(rows, dim).uniform_(-0.01, 0.01)
    squares = torch.zeros(rows) if optimizer == "RowWiseAdagrad" else None

    def step(numbers: Tensor) -> None:
        out = torch.empty_like(grad)
        compiled = function(
            weights.data_ptr(),
            squares.data_ptr() if squares is not None else None,
            dim,
            numbers.data_ptr(),
            *numbers.shape,
            out.data_ptr(),
            grad.data_ptr(),
            LEARNING_RATE,
            torch.get_num_threads(),
        )
        if not compiled:
            raise ValueError(f"dim={dim}: expected 16, 64 or 128, the dims static_step.cpp has")

    return step
