"""Calls of every op that needs no table, with small shapes; see small_shapes.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import Pooling


class Calls:
    """The same calls on any device, and what came of them.

    Args:
        device: of the tensors.
        program: what the names of results begin with.
        results: gets the results.
    """

    part_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, device: torch.device, program: str, results: dict[str, Tensor]) -> None:
        self.device = device
        self._program = program
        self._results = results

    def parts(self) -> dict[str, Callable[[], None]]:
        """Return the calls to run by name, the first one before any other."""
        return {name: getattr(self, f"_{name}") for name in self.part_names}

    def keep(self, name: str, *tensors: Tensor) -> None:
        """Note results."""
        for number, tensor in enumerate(tensors):
            self._results[f"{self._program}: {name}[{number}]"] = tensor.detach().clone().cpu()

    def tensor(self, values: Any) -> Tensor:
        """Return an int64 tensor on the device."""
        return torch.tensor(values, dtype=torch.int64).to(self.device)


class ValueCalls(Calls):
    """Program of the ops on ids, values of features and rows of their own."""

    part_names = ("routing", "bags", "ragged", "feature_values")

    def _routing(self) -> None:
        ids = self.tensor([5, -1, 2**63 - 1, 5, 0])
        mixed = ops.mix_ids(ids)
        unique = ops.unique_ids(ids, self.tensor([0, 2, 2, 5]))
        many, bounds = self.tensor(range(3000)) ** 2 % 997 - 400, self.tensor([0, 1000, 3000])
        for name, given in {
            "few": (ids, self.tensor([0, 2, 2, 5])),
            "many": (many, bounds),
        }.items():
            self.keep(f"unique {name}", *ops.unique_ids(*given, padded=True))
            self.keep(f"partition {name}", *ops.ids_partition(*given, parts=3))
        self.keep(
            "owners", ops.id_owners(ids, parts=3, slots=7), ops.ids_encode([ids, many], [0, 1])
        )
        ragged = self.tensor([0, 1]).int()
        self.keep("concat", *ops.ids_concat([ids, mixed.int()], bags=2, offsets=[ragged, ragged]))
        self.keep("routing", mixed, ops.unmix_ids(mixed, parts=3, part=1), *unique)

    def _bags(self) -> None:
        offsets = self.tensor([0, 2, 2, 3, 5])
        positions = self.tensor([0, 2, 1, 1, 2])
        for dim in (4, 7):
            for weighted in (False, True):
                rows = torch.linspace(-1, 1, 3 * dim).reshape(3, dim).to(self.device)
                rows.requires_grad_()
                weights = None
                if weighted:
                    weights = torch.linspace(0.5, 1, 5).to(self.device).requires_grad_()
                outputs = [
                    ops.pool_rows(
                        rows, positions, offsets, features=2, weights=weights, pooling=pooling
                    )
                    for pooling in (Pooling.SUM, Pooling.MEAN)
                ]
                outputs += ops.ragged_tile(
                    rows,
                    positions,
                    offsets,
                    features=2,
                    tile_lens=[1, 3],
                    pad_left=[False, True],
                    weights=weights,
                )
                gradients = [
                    torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(self.device)
                    for output in outputs
                ]
                torch.autograd.backward(outputs, gradients)  # tiles share a node of the graph
                self.keep(f"plain rows {dim} {weighted}", *outputs)
                for name, given in (("rows", rows), ("weights", weights)):
                    if given is not None and given.grad is not None:
                        self.keep(f"plain {name} {dim} {weighted}", given.grad)

    def _ragged(self) -> None:
        ids = self.tensor([5, 5, 6, 7, 8, 5, 1])
        offsets = self.tensor([0, 3, 3, 7])
        bytes_of = (ids % 2 == 0, ids.short(), ids.float())
        values = [ids, *bytes_of]
        all_offsets = [offsets] * 4
        weights = [torch.linspace(0, 1, 7).to(self.device), None, None, None]
        cut = ops.ragged_cutoff_2d(
            values, all_offsets, [2, 9, 0, 3], weights=weights, drop_left=[True, False] * 2
        )
        self.keep("cut", *cut.values, *cut.offsets)
        outer, inner = self.tensor([0, 2, 2, 3]), self.tensor([0, 3, 3, 7])
        lists = ops.ragged_cutoff_3d(
            [ids] * 2, [outer] * 2, [inner] * 2, [1, 3], pad_left=[False, True]
        )
        self.keep("cut lists", *lists.values, *lists.outer_offsets, *lists.inner_offsets)
        indices = self.tensor([2, 0, -1, 1, 9, 3]).reshape(3, 2)
        top = ops.ragged_topk_index_cutoff(values, all_offsets, [indices] * 4)
        self.keep("top", *top.values, *top.offsets)
        lengths = [[5], [5], [5], [2, 4]]
        nested = [[offsets], [offsets], [offsets], [outer, inner]]
        dense = ops.ragged_to_dense(values, nested, lengths=lengths, padding_value=1)
        self.keep("dense", *dense)
        sparse = ops.ragged_to_sparse(values, nested, lengths=lengths)
        self.keep("indices", *(tensor.indices() for tensor in sparse))
        for number, ragged in enumerate(ops.dense_to_ragged(dense, invalid_value=1)):
            self.keep(f"ragged {number}", ragged.values, *ragged.offsets)
        crossed = ops.feature_cross_ragged([ids], [offsets], [ids % 3], [offsets])
        self.keep("crossed", *crossed.values, *crossed.offsets, *crossed.weights)

    def _feature_values(self) -> None:
        values = [self.tensor([5, -1, 2**63 - 1]), self.tensor([[7], [8]])]
        self.keep("mod", *ops.mod(values, [7, 3]))
        bounds = [self.tensor([0, 6]), self.tensor([8])]
        self.keep("bucketize", *ops.bucketize(values, bounds))
        floats = [torch.tensor([0.5, float("nan"), 3.0]).to(self.device)]
        self.keep("bucketize floats", *ops.bucketize(floats, [floats[0][::2].contiguous()]))
        for hashes in ops.multi_hash(values, [[1, 3], [5]], [[29, 47], [67]], [[9, 8], [7]]):
            self.keep(f"multi_hash {len(hashes)}", *hashes)
        text = (self.tensor(range(1300)) % 251).byte()
        strings = self.tensor([*range(4), 20, 60, 160, 300, 1300])
        self.keep("farmhash", *ops.farmhash([text, text[:0]], [strings, self.tensor([0, 0])]))
        self.keep("murmurhash", *ops.murmurhash([text], [strings], seed=3))
        self.keep("murmurhash64a", *ops.murmurhash64a([text], [strings], seed=3))
