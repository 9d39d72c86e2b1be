"""Ops on ids, values and strings of many features."""

from __future__ import annotations

from functools import partial

import torch

from op_cases.groups import Case, OpArguments
from torch_dynemb.ops.columns import StringHash

FARM, MURMUR3, MURMUR64A = map(int, StringHash)


def string_arguments(*, empty: bool = False) -> OpArguments:
    """Strings of every length from 0 to 140, at every alignment; others of signed bytes."""
    if empty:
        return [torch.empty(0).byte(), torch.empty(0).byte()], [torch.tensor([0])] * 2
    lengths = torch.arange(141)
    text = torch.arange(int(lengths.sum())) * 37 % 251
    values = [text.byte(), torch.tensor([-1, 5, -128], dtype=torch.int8)]
    return values, [torch.cat([torch.zeros(1).long(), lengths.cumsum(0)]), torch.tensor([0, 2, 3])]


UNIQUE_CASES: dict[str, Case] = {
    "": lambda: (torch.tensor([5, -1, 5, 5, 7]), torch.tensor([0, 3, 3, 5])),
    "many": lambda: (torch.arange(700) ** 2 % 97 - 40, torch.tensor([0, 300, 300, 310, 700])),
    "empty": lambda: (torch.tensor([], dtype=torch.int64), torch.tensor([0, 0])),
}


def unique_arguments(case: str, padded: bool) -> OpArguments:
    return *UNIQUE_CASES[case](), padded


def partition_arguments(case: str, parts: int, slots: int) -> OpArguments:
    return *UNIQUE_CASES[case](), parts, slots


CASES: dict[str, dict[str, Case]] = {
    "mix_ids": {"": lambda: (torch.tensor([5, -1, 2**63 - 1]),)},
    "unmix_ids": {"": lambda: (torch.tensor([5, -1, 2**60]), 8, 3)},
    "unique_ids": {
        **{name: partial(unique_arguments, name, False) for name in UNIQUE_CASES},
        **{
            f"{name} padded".strip(): partial(unique_arguments, name, True) for name in UNIQUE_CASES
        },
    },
    "id_owners": {"": lambda: (torch.tensor([5, -1, 2**63 - 1, -(2**63)]), 3, 65536)},
    "ids_partition": {
        name: partial(partition_arguments, case, parts, slots)
        for name, case, parts, slots in (
            ("", "", 3, 65536),
            ("many", "many", 5, 7),
            ("empty", "empty", 2, 2),
        )
    },
    "ids_concat": {
        "": lambda: (
            [torch.arange(6).reshape(2, 3), torch.arange(4).int(), torch.tensor([2**62])],
            [torch.tensor([0, 3]), torch.tensor([0, 0, 1]).int()],
            [1, 2],
            2,
        ),
        "sequences": lambda: ([torch.arange(300), torch.tensor(4), torch.arange(0)], [], [], 1),
        "one feature": lambda: ([torch.arange(5)], [torch.tensor([0, 2, 2])], [0], 3),
        "no bags": lambda: ([torch.empty(0, 3).long()], [torch.tensor([0])], [0], 0),
    },
    "ids_encode": {
        "": lambda: ([torch.tensor([5, -1]), torch.tensor([[5], [2**62]])], [0, -7]),
        "one table": lambda: ([torch.arange(300)], [4]),
    },
    "bucketize": {
        "": lambda: (
            [
                torch.tensor([0.5, 0.75, 9.0]).double(),
                torch.tensor([[1.0], [2.0]]).double(),
            ],
            [torch.tensor([0.5, 0.5, 1.0]).double(), torch.empty(0).double()],
        ),
        "other dtypes": lambda: (
            [torch.tensor([0.5, float("inf")]), torch.arange(-9, 9).int(), torch.arange(400) % 50],
            [torch.tensor([float("-inf"), 1.0]), torch.arange(-5, 5).int(), torch.arange(5, 40)],
        ),
    },
    "multi_hash": {
        "": lambda: (
            [torch.tensor([5, -1, 2**63 - 1]), torch.tensor([[7]]), torch.tensor([3])],
            [1, 3, -5],
            [29, 2**63 - 1, 41],
            [10, 2**62, 7],
            [2, 0, 1],
        )
    },
    "string_hash": {
        "farm": lambda: (*string_arguments(), FARM, 0),
        "empty": lambda: (*string_arguments(empty=True), FARM, 0),
        "murmur3": lambda: (*string_arguments(), MURMUR3, 0),
        "murmur3 seed": lambda: (*string_arguments(), MURMUR3, 2**32 - 1),
        "murmur64a": lambda: (*string_arguments(), MURMUR64A, 0),
        "murmur64a seed": lambda: (*string_arguments(), MURMUR64A, -(2**63)),
    },
    "mod": {
        "": lambda: (
            [torch.tensor([5, -1, 2**63 - 1]), torch.tensor([[-(2**63)], [9]])],
            [7, 2**40],
        ),
        "one feature": lambda: ([torch.arange(-300, 300)], [10]),
        "empty": lambda: (
            [torch.empty(0, 2).long(), torch.tensor([3]), torch.empty(0).long()],
            [1, 2, 3],
        ),
    },
}
