"""Optimizers of sharded tables: by fused_params, by the sharder, and applied in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from ranks import Ranks
from sharded_models import Table
from sharded_training import Case, trains_as_unsharded
from torchrec.optim.optimizers import Adagrad, Adam, LarsSGD

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

TABLES = (
    Table("rows", 8, ("a", "b"), "sum", "row_wise"),
    Table("whole", 16, ("c",), "mean", "table_wise"),
)
HYPER = {
    "learning_rate": 0.05,
    "eps": 1e-3,
    "beta1": 0.8,
    "beta2": 0.9,
    "momentum": 0.7,
    "eta": 0.5,
}
ADAM: dict[str, Any] = {"lr": 0.05, "eps": 1e-3, "betas": (0.8, 0.9)}
# `weight_decay` of FBGEMM's Adam family is decoupled
DECAYED: dict[str, Any] = {**ADAM, "weight_decay": 0.1, "decoupled_weight_decay": True}
BY_FUSED_PARAMS: dict[EmbOptimType, tuple[dict[str, Any], td.OptimizerConfig]] = {
    EmbOptimType.SGD: ({}, td.SGD(lr=0.05)),
    EmbOptimType.EXACT_SGD: ({}, td.SGD(lr=0.05)),
    EmbOptimType.LARS_SGD: (
        {"weight_decay": 0.1},
        td.LARSSGD(lr=0.05, momentum=0.7, trust_coefficient=0.5, weight_decay=0.1),
    ),
    EmbOptimType.EXACT_ADAGRAD: ({}, td.Adagrad(lr=0.05, eps=1e-3)),
    EmbOptimType.ROWWISE_ADAGRAD: ({}, td.RowWiseAdagrad(lr=0.05, eps=1e-3)),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (
        {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2},
        td.RowWiseAdagrad(lr=0.05, eps=1e-3, weight_decay=0.1),
    ),
    EmbOptimType.ADAM: ({"weight_decay": 0.1}, td.Adam(**DECAYED)),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: ({"weight_decay": 0.1}, td.PartialRowWiseAdam(**DECAYED)),
    EmbOptimType.LAMB: ({"weight_decay": 0.1}, td.LAMB(**DECAYED)),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: ({"weight_decay": 0.1}, td.PartialRowWiseLAMB(**DECAYED)),
}


@pytest.mark.parametrize("kind", BY_FUSED_PARAMS, ids=str)
def test_optimizer_of_fused_params(two_ranks: Ranks, kind: EmbOptimType) -> None:
    more, optimizer = BY_FUSED_PARAMS[kind]
    fused_params = {**HYPER, **more, "optimizer": kind}
    two_ranks.run(trains_as_unsharded, Case(TABLES, fused_params=fused_params, optimizer=optimizer))


@pytest.mark.parametrize(
    ("fused_params", "optimizer"),
    [
        ({"lr": 0.2}, td.SGD(lr=0.2)),
        (
            {"optimizer": EmbOptimType.ADAM, "lr": 0.2, "betas": (0.5, 0.6)},
            td.Adam(lr=0.2, betas=(0.5, 0.6)),
        ),
        (
            {"learning_rate": 0.2, "gradient_clipping": True, "max_gradient": 0.3},
            td.SGD(lr=0.2, clip_value=0.3),
        ),
        (
            {
                "optimizer": EmbOptimType.EXACT_ADAGRAD,
                "learning_rate": 0.2,
                "weight_decay": 0.1,
                "weight_decay_mode": WeightDecayMode.DECOUPLE,
            },
            td.Adagrad(lr=0.2, eps=1e-8, weight_decay=0.1, decoupled_weight_decay=True),
        ),
        ({}, td.SGD(lr=0.01)),
    ],
    ids=["lr", "betas", "clipping", "decoupled", "defaults"],
)
def test_other_fused_params(
    two_ranks: Ranks, fused_params: dict[str, Any], optimizer: td.OptimizerConfig
) -> None:
    two_ranks.run(trains_as_unsharded, Case(TABLES, fused_params=fused_params, optimizer=optimizer))


@pytest.mark.parametrize(
    "optimizer",
    [td.Ftrl(lr=0.1), td.AMSGrad(lr=0.05), td.Adam(lr=0.05, row_steps=True)],
    ids=lambda config: config.name,
)
def test_optimizer_of_the_sharder(two_ranks: Ranks, optimizer: td.OptimizerConfig) -> None:
    two_ranks.run(
        trains_as_unsharded, Case(TABLES, sharder_optimizer=optimizer, optimizer=optimizer)
    )


@pytest.mark.parametrize(
    ("kind", "arguments", "optimizer"),
    [
        (torch.optim.SGD, {"lr": 0.05}, td.SGD(lr=0.05)),
        (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-3}, td.Adagrad(lr=0.05, eps=1e-3)),
        (torch.optim.Adam, dict(ADAM), td.Adam(**ADAM)),
        (Adam, dict(ADAM), td.Adam(**ADAM)),
        (Adagrad, {"lr": 0.05, "eps": 1e-3}, td.Adagrad(lr=0.05, eps=1e-3)),
        (LarsSGD, {"lr": 0.05}, td.LARSSGD(lr=0.05)),
    ],
    ids=["torch_sgd", "torch_adagrad", "torch_adam", "adam", "adagrad", "lars_sgd"],
)
@pytest.mark.parametrize("sharders", [None, td.Ftrl(lr=0.1)], ids=["alone", "over_the_sharders"])
def test_optimizer_applied_in_backward(
    two_ranks: Ranks,
    kind: type,
    arguments: dict[str, Any],
    optimizer: td.OptimizerConfig,
    sharders: td.OptimizerConfig | None,
) -> None:
    two_ranks.run(
        trains_as_unsharded,
        Case(
            TABLES,
            fused_params={},
            in_backward=(kind, arguments),
            sharder_optimizer=sharders,
            optimizer=optimizer,
        ),
    )
