"""Conversion of TorchRec's fused_params into an optimizer config."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

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
# FBGEMM's Adam family and LARS decay weights for any weight_decay_mode.
_ADAM = ("eps", "betas", "weight_decay")
_CLASSES: dict[EmbOptimType, tuple[type[OptimizerConfig], tuple[str, ...]]] = {
    EmbOptimType.SGD: (SGD, ()),
    EmbOptimType.EXACT_SGD: (SGD, ()),
    EmbOptimType.LARS_SGD: (LARSSGD, ("momentum", "trust_coefficient", "weight_decay")),
    EmbOptimType.EXACT_ADAGRAD: (Adagrad, ("eps",)),
    EmbOptimType.ROWWISE_ADAGRAD: (RowWiseAdagrad, ("eps",)),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (RowWiseAdagrad, ("eps",)),
    EmbOptimType.ADAM: (Adam, _ADAM),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: (PartialRowWiseAdam, _ADAM),
    EmbOptimType.LAMB: (LAMB, _ADAM),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: (PartialRowWiseLAMB, _ADAM),
}
# Their names in fused_params, and FBGEMM's defaults.
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

    ``optimizer`` is an EmbOptimType (default EXACT_SGD). In FBGEMM's Adam family weight decay is
    decoupled; row-wise Adagrad, Adagrad and SGD follow ``weight_decay_mode``.

    Raises:
        NotImplementedError: dynamic tables lack the optimizer or the mode, such as COUNTER.
        ValueError: an entry without a meaning for dynamic tables.
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
    if kind not in _CLASSES:
        raise NotImplementedError(
            f"{owner}: fused_params has optimizer {kind!r}, expected one of "
            f"{[str(known) for known in _CLASSES]}; or give the sharder optimizer=, one of "
            "torch_dynemb's configs"
        )
    config, takes = _CLASSES[kind]
    values = {
        "eps": given["eps"],
        "momentum": given["momentum"],
        "trust_coefficient": given["eta"],
        "betas": (given["beta1"], given["beta2"]),
        "weight_decay": given["weight_decay"],
    }
    arguments: dict[str, Any] = {name: values[name] for name in takes}
    if "betas" in takes:
        arguments["decoupled_weight_decay"] = True
    if "weight_decay" not in takes:
        arguments |= _weight_decay(owner, given["weight_decay"], given["weight_decay_mode"])
    return config(
        lr=given["learning_rate"],
        clip_value=given["max_gradient"] if given["gradient_clipping"] else None,
        stochastic_rounding=given["stochastic_rounding"],
        **arguments,
    )


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


__all__ = ["optimizer_of", "output_dtype_of", "warn_of_prefetch"]
