"""Optimizers that fused_params describe, with the names of FBGEMM and of DynamicEmb."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

import torch_dynemb as td
from torch_dynemb.compat.dynamicemb import DynamicEmbOptimType
from torch_dynemb.torchrec.planning.fused_params import optimizer_of

pytestmark = pytest.mark.cpu_only("configs")

FTRL = {"optimizer": DynamicEmbOptimType.FTRL}
ADAGRAD = {"optimizer": EmbOptimType.EXACT_ADAGRAD}
ROW_WISE = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {**FTRL, "learning_rate": 0.1, "ftrl_beta": 1.0, "l1_reg": 0.2, "l2_reg": 0.3},
            td.Ftrl(lr=0.1, beta=1.0, l1=0.2, l2=0.3, initial_accumulator_value=0.0),
        ),
        (
            {**FTRL, "initial_accumulator_value": 0.5, "learning_rate_power": -0.5},
            td.Ftrl(lr=0.01, initial_accumulator_value=0.5),
        ),
        (
            {**FTRL, "ftrl_beta": 1.0, "gradient_clipping": True, "max_gradient": 2.0},
            td.Ftrl(lr=0.01, beta=1.0, initial_accumulator_value=0.0, clip_value=2.0),
        ),
        (
            {**FTRL, "ftrl_beta": 1.0, "optimizer_state_dtype": torch.bfloat16},
            td.Ftrl(lr=0.01, beta=1.0, initial_accumulator_value=0.0, state_dtype=torch.bfloat16),
        ),
        (
            {**ADAGRAD, "initial_accumulator_value": 0.5, "eps": 0.25},
            td.Adagrad(lr=0.01, initial_accumulator_value=0.5, eps=0.25),
        ),
        (
            {**ROW_WISE, "initial_accumulator_value": 0.5, "optimizer_state_dtype": torch.float32},
            td.RowWiseAdagrad(lr=0.01, initial_accumulator_value=0.5, eps=1e-8),
        ),
    ],
)
def test_optimizers_of_dynamicemb(given: dict[str, Any], expected: Any) -> None:
    assert optimizer_of("table", given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (FTRL, "ftrl_beta, l2_reg and initial_accumulator_value 0.*give one of them"),
        ({**FTRL, "ftrl_beta": 1.0, "learning_rate_power": -0.25}, "only -0.5 is built"),
        ({**ADAGRAD, "l1_reg": 0.1}, "l1_reg 0.1, which exact_adagrad does not take: remove it"),
        ({"initial_accumulator_value": 0.1}, "initial_accumulator_value 0.1, which exact_sgd does"),
        (
            {**ADAGRAD, "optimizer_state_dtype": torch.float16},
            "optimizer_state_dtype torch.float16",
        ),
        ({**ROW_WISE, "optimizer_state_dtype": torch.bfloat16}, "optimizer_state_dtype torch.bf"),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(
        (NotImplementedError, ValueError), match=f"table: fused_params has .*{message}"
    ):
        optimizer_of("table", given)
