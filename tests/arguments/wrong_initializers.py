"""Initializers, and tables that they do not fit."""

from __future__ import annotations

import math

from refusing import Row, raising

import torch_dynemb as td
from torch_dynemb.initializers import Initializer
from torch_dynemb.table.config import ColumnShard


def of_17_columns(initializer: Initializer) -> td.TableGroup:
    return td.TableGroup([td.TableConfig("t", 17, initializer=initializer)], optimizer=None)


ROWS: list[Row] = [
    *raising(
        ValueError,
        (lambda: td.Uniform(1.0, 0.0), r"Uniform: low is 1\.0, expected at most high = 0\.0"),
        (lambda: td.Uniform(0.0, math.inf), r"Uniform: high is inf, expected a finite"),
        (lambda: td.Normal(mean=math.nan), r"Normal: mean is nan, expected a finite"),
        (lambda: td.TruncatedNormal(std=0.0), r"TruncatedNormal: std is 0\.0, expected more"),
        (lambda: td.TruncatedNormal(low=1.0, high=1.0), r"low is 1\.0, expected less than high"),
        (lambda: td.TruncatedNormal(low=8.0, high=9.0), r"\[8\.0, 9\.0\] holds less than 1e-6"),
        (lambda: td.Uniform(-3e38, 3e38), r"Uniform: high - low is 6e\+38, expected a finite"),
        (lambda: td.Constant(math.nan), r"Constant: value is nan"),
        (lambda: td.Constant(1e39), r"Constant: value is 1e\+39, .* of single precision"),
        (lambda: td.XavierUniform(0.0), r"XavierUniform: gain is 0\.0, expected more than 0"),
        (lambda: td.XavierNormal(-1.0), r"XavierNormal: gain is -1\.0"),
        (lambda: td.XavierNormal(math.inf), r"XavierNormal: gain is inf, expected a finite"),
        (lambda: td.XavierNormal(fan_out=0), r"XavierNormal: fan_out is 0, expected more than 0"),
        (lambda: td.XavierUniform(fan_out=-3), r"XavierUniform: fan_out is -3, expected more"),
        (lambda: td.KaimingUniform(math.inf), r"KaimingUniform: slope is inf"),
        (lambda: td.KaimingNormal(math.nan), r"KaimingNormal: slope is nan"),
        (lambda: td.ByColumn(((0, td.Constant()),)), r"a part has 0 columns, expected at least 1"),
        (
            lambda: of_17_columns(td.ByColumn(((2, td.Constant()), (3, td.Normal())))),
            r"ByColumn have 5 columns, but embedding_dim is 17",
        ),
        (
            lambda: td.TableConfig("part", 8, shard=ColumnShard("whole", 24, 2)),
            "first_column to be a multiple of 4 from 0 to 16",
        ),
        (
            lambda: td.TableConfig("part", 8, shard=ColumnShard("whole", 24, -4)),
            "first_column to be a multiple of 4 from 0 to 16",
        ),
        (
            lambda: td.TableConfig("part", 8, shard=ColumnShard("whole", 24, 20)),
            "first_column to be a multiple of 4 from 0 to 16",
        ),
    ),
    *raising(
        TypeError,
        (
            lambda: td.ByColumn(((1, td.ByColumn(((1, td.Constant()),))),)),
            "a part is a ByColumn itself: write its parts out",
        ),
    ),
]
