"""Configs of tables, their groups, and policies of their features."""

from __future__ import annotations

from refusing import Row, raising

import torch_dynemb as td

ROWS: list[Row] = [
    *raising(
        ValueError,
        (
            lambda: td.TableGroup(
                [td.TableConfig("a", 3), td.TableConfig("b", 3), td.TableConfig("a", 3)],
                optimizer=None,
            ),
            r"2 tables are named 'a'",
        ),
        (
            lambda: td.TableConfig("t", 4, ["f"], feature_policies={"x": td.FeaturePolicy()}),
            r"names 'x', but the features are \['f'\]",
        ),
        (
            lambda: td.TableConfig(
                "t", 4, ["f"], feature_policies={"f": td.FeaturePolicy(threshold=2)}
            ),
            "has a threshold, but the table's adm",
        ),
    ),
    *raising(
        TypeError,
        (
            lambda: td.TableConfig("t", 4, ["f"], feature_policies={"f": 3}),
            r"feature_policies\['f'\] is 3, expected a FeaturePolicy",
        ),
    ),
]
