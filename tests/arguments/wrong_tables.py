"""Configs of tables, their groups, and policies of their features."""

from __future__ import annotations

import torch
from refusing import Row

import torch_dynemb as td

ROWS: list[Row] = [
    (lambda: td.TableConfig("", 4), ValueError, "TableConfig: name is empty"),
    (lambda: td.TableConfig("t", 0), ValueError, "'t': embedding_dim is 0, expected at least 1"),
    (
        lambda: td.TableGroup([], optimizer=None),
        ValueError,
        r"tables is empty, expected at least one",
    ),
    (
        lambda: td.TableGroup(
            [td.TableConfig("a", 3), td.TableConfig("b", 3), td.TableConfig("a", 3)], optimizer=None
        ),
        ValueError,
        r"2 tables are named 'a'",
    ),
    (
        lambda: td.TableGroup([td.TableConfig("a", 3)], optimizer=None, max_rows=0),
        ValueError,
        r"max_rows is 0, expected 1 to \d+, or None",
    ),
    (
        lambda: td.TableGroup([td.TableConfig("a", 3)], optimizer=torch.optim.SGD),
        TypeError,
        r"optimizer is .*, expected a config",
    ),
    (
        lambda: td.TableConfig("t", 4, ["f"], feature_policies={"x": td.FeaturePolicy()}),
        ValueError,
        r"names 'x', but the features are \['f'\]",
    ),
    (
        lambda: td.TableConfig("t", 4, ["f"], feature_policies={"f": 3}),
        TypeError,
        r"feature_policies\['f'\] is 3, expected a FeaturePolicy",
    ),
    (
        lambda: td.TableConfig(
            "t", 4, ["f"], feature_policies={"f": td.FeaturePolicy(threshold=2)}
        ),
        ValueError,
        "has a threshold, but the table's adm",
    ),
]
