"""Conversion of TorchRec's fused_params into an optimizer config."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.types import DataType

from torch_dynemb.optim import (
    LAMB,
    LARSSGD,
    SGD,
    Adagrad,
    Adam,
    Ftrl,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from torch_dynemb.optim.base import OptimizerConfig

_OUTPUT_DTYPES = {
    SparseType.FP32: torch.float32,
    SparseType.FP16: torch.float16,
    SparseType.BF16: torch.bfloat16,
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
}


class DynamicEmbOptimType(enum.Enum):
    """Optimizers of DynamicEmb that FBGEMM's EmbOptimType lacks, for ``fused_params``.

    Attributes:
        FTRL: :class:`torch_dynemb.Ftrl`, with ``learning_rate``, ``l1_reg``, ``l2_reg``,
            ``ftrl_beta`` and ``initial_accumulator_value`` of the fused_params.
    """

    FTRL = "ftrl"

    def __repr__(self) -> str:
        return str(self)  # code, so that signatures in the documentation can be read


# FBGEMM's Adam family and LARS decay weights for any weight_decay_mode.
_ADAM = ("eps", "betas", "weight_decay")
_ADAGRAD = ("eps", "initial_accumulator_value")
_FTRL = ("l1", "l2", "beta", "initial_accumulator_value")
OptimType: TypeAlias = EmbOptimType | DynamicEmbOptimType
_CLASSES: dict[OptimType, tuple[type[OptimizerConfig], tuple[str, ...]]] = {
    EmbOptimType.SGD: (SGD, ()),
    EmbOptimType.EXACT_SGD: (SGD, ()),
    EmbOptimType.LARS_SGD: (LARSSGD, ("momentum", "trust_coefficient", "weight_decay")),
    EmbOptimType.EXACT_ADAGRAD: (Adagrad, _ADAGRAD),
    EmbOptimType.ROWWISE_ADAGRAD: (RowWiseAdagrad, _ADAGRAD),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (RowWiseAdagrad, _ADAGRAD),
    EmbOptimType.ADAM: (Adam, _ADAM),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: (PartialRowWiseAdam, _ADAM),
    EmbOptimType.LAMB: (LAMB, _ADAM),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: (PartialRowWiseLAMB, _ADAM),
    DynamicEmbOptimType.FTRL: (Ftrl, _FTRL),
}
# Their names in fused_params, and the defaults of FBGEMM, or of DynamicEmb: the last six.
_DEFAULTS: dict[str, Any] = {
    "learning_rate": 0.01,
    "eps": 1.0e-8,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "weight_decay_mode": WeightDecayMode.NONE,
    "eta": 0.001,
    "beta1": 0.9,
    "beta2": 0.999,
    "gradient_clipping": False,
    "max_gradient": 1.0,
    "stochastic_rounding": True,
    "initial_accumulator_value": 0.0,
    "optimizer_state_dtype": None,
    "learning_rate_power": -0.5,
    "ftrl_beta": 0.0,
    "l1_reg": 0.0,
    "l2_reg": 0.0,
}
# Entries that some optimizers alone take, and their arguments.
_OWN = {
    "initial_accumulator_value": "initial_accumulator_value",
    "ftrl_beta": "beta",
    "l1_reg": "l1",
    "l2_reg": "l2",
}
_KNOWN = {*_DEFAULTS, "optimizer", "betas", "lr", "output_dtype", "prefetch_pipeline"}
# Options of WeightDecayMode.COUNTER and COWCLIP.
_COUNTING = ("counter_based_regularization", "cowclip_regularization")
_BY_STALENESS = (
    "for rows that shrink by the steps since their last update, give the sharder "
    "optimizer=torch_dynemb.RowWiseRMSprop(ar_alpha=...)"
)
_warned: set[str] = set()


def optimizer_of(owner: str, fused_params: Mapping[str, Any]) -> OptimizerConfig:
    """Return the optimizer config that fused_params describe, with FBGEMM's defaults and meaning.

    ``optimizer`` is an EmbOptimType (default EXACT_SGD) or a :class:`DynamicEmbOptimType`. In
    FBGEMM's Adam family weight decay is decoupled; row-wise Adagrad, Adagrad and SGD follow
    ``weight_decay_mode``.

    Raises:
        NotImplementedError: dynamic tables lack the optimizer, the mode, such as COUNTER, or the
            state's dtype.
        ValueError: an entry without a meaning for dynamic tables or for the optimizer.
    """
    counting = [name for name in _COUNTING if fused_params.get(name) is not None]
    if counting:
        raise NotImplementedError(
            f"{owner}: fused_params has {counting}, which dynamic tables lack: {_BY_STALENESS}"
        )
    unknown = sorted(set(fused_params) - _KNOWN)
    if unknown:
        raise ValueError(
            f"{owner}: fused_params has {unknown}, without a meaning for dynamic tables, expected "
            f"some of {sorted(_KNOWN)}: remove them, or give them to the sharder of static tables"
        )
    given = {**_DEFAULTS, **fused_params}
    if "lr" in given:
        given["learning_rate"] = given["lr"]
    if "betas" in given:
        given["beta1"], given["beta2"] = given["betas"]
    kind = given.get("optimizer", EmbOptimType.EXACT_SGD)
    config, takes = _class_of(owner, kind)
    values = {
        "eps": given["eps"],
        "momentum": given["momentum"],
        "trust_coefficient": given["eta"],
        "betas": (given["beta1"], given["beta2"]),
        "weight_decay": given["weight_decay"],
        **{argument: given[name] for name, argument in _OWN.items()},
    }
    arguments: dict[str, Any] = {name: values[name] for name in takes}
    if "betas" in takes:
        arguments["decoupled_weight_decay"] = True
    if "weight_decay" not in takes:
        arguments |= _weight_decay(owner, given["weight_decay"], given["weight_decay_mode"])
    arguments |= _state_dtype(owner, kind, config, given["optimizer_state_dtype"])
    _check_own(owner, kind, takes, given)
    return config(
        lr=given["learning_rate"],
        clip_value=given["max_gradient"] if given["gradient_clipping"] else None,
        stochastic_rounding=given["stochastic_rounding"],
        **arguments,
    )


def default_optimizer(owner: str, kind: OptimType) -> OptimizerConfig:
    """Return an optimizer of a kind with default arguments, for the sizes of its state.

    Raises:
        NotImplementedError: dynamic tables lack the optimizer.
    """
    return _class_of(owner, kind)[0]()


def _class_of(owner: str, kind: Any) -> tuple[type[OptimizerConfig], tuple[str, ...]]:
    if kind not in _CLASSES:
        raise NotImplementedError(
            f"{owner}: fused_params has optimizer {kind!r}, expected one of "
            f"{[str(known) for known in _CLASSES]}; or give the sharder optimizer=, one of "
            "torch_dynemb's configs"
        )
    return _CLASSES[kind]


def _check_own(owner: str, kind: OptimType, takes: tuple[str, ...], given: dict[str, Any]) -> None:
    """Check the entries that some optimizers alone take."""
    if given["learning_rate_power"] != _DEFAULTS["learning_rate_power"]:
        raise NotImplementedError(
            f"{owner}: fused_params has learning_rate_power {given['learning_rate_power']}, but "
            "only -0.5 is built, the square root of McMahan et al. 2013: leave it out"
        )
    for name, argument in _OWN.items():
        if argument not in takes and given[name] != _DEFAULTS[name]:
            raise ValueError(
                f"{owner}: fused_params has {name} {given[name]}, which {kind} does not take: "
                "remove it"
            )
    ftrl = (given["ftrl_beta"], given["l2_reg"], given["initial_accumulator_value"])
    if kind == DynamicEmbOptimType.FTRL and not any(ftrl):
        raise ValueError(
            f"{owner}: fused_params has ftrl_beta, l2_reg and initial_accumulator_value 0, so a "
            "weight without a gradient would be 0 / 0: give one of them, such as 'ftrl_beta': 1.0"
        )


def _state_dtype(
    owner: str, kind: OptimType, config: type[OptimizerConfig], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    if dtype in (None, torch.float32):
        return {}
    if dtype != torch.bfloat16 or "state_dtype" not in {entry.name for entry in fields(config)}:
        raise NotImplementedError(
            f"{owner}: fused_params has optimizer_state_dtype {dtype}, expected torch.float32, or "
            f"torch.bfloat16 for a state with a value per weight, which {kind} may lack: remove it"
        )
    return {"state_dtype": dtype}


def _weight_decay(owner: str, weight_decay: float, mode: WeightDecayMode) -> dict[str, Any]:
    if mode not in (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE):
        raise NotImplementedError(
            f"{owner}: fused_params has weight_decay_mode {mode}, expected NONE, L2 or DECOUPLE; "
            + _BY_STALENESS
        )
    if weight_decay == 0:
        return {}
    if mode == WeightDecayMode.NONE:
        raise ValueError(
            f"{owner}: fused_params has weight_decay {weight_decay}, but weight_decay_mode NONE, "
            "which ignores it: give WeightDecayMode.L2 or WeightDecayMode.DECOUPLE"
        )
    return {
        "weight_decay": weight_decay,
        "decoupled_weight_decay": mode == WeightDecayMode.DECOUPLE,
    }


def output_dtype_of(owner: str, fused_params: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of lookup outputs.

    Raises:
        NotImplementedError: the dtype is quantized.
    """
    given = fused_params.get("output_dtype", SparseType.FP32)
    if given not in _OUTPUT_DTYPES:
        raise NotImplementedError(
            f"{owner}: fused_params has output_dtype {given}, expected FP32, FP16 or BF16"
        )
    return _OUTPUT_DTYPES[given]


def warn_of_prefetch(owner: str, fused_params: Mapping[str, Any]) -> None:
    """Warn once in a process if ``prefetch_pipeline`` is True for a table with its rows in memory.

    Args:
        owner: prefix of the warning: the table.
        fused_params: of the table.
    """
    if not fused_params.get("prefetch_pipeline") or "prefetch_pipeline" in _warned:
        return
    _warned.add("prefetch_pipeline")
    warnings.warn(
        f"{owner}: fused_params has prefetch_pipeline=True, which has no effect here: all rows are "
        "in memory and need no prefetching. Rows of tables with storage are prefetched by "
        "torch_dynemb.torchrec.PrefetchTrainPipeline, without this option",
        UserWarning,
        stacklevel=2,
    )


__all__ = [
    "DynamicEmbOptimType",
    "OptimType",
    "default_optimizer",
    "optimizer_of",
    "output_dtype_of",
    "warn_of_prefetch",
]
