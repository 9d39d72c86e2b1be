"""``torch_dynemb.torchrec``, and names of DynamicEmb."""

from __future__ import annotations

import torch
from refusing import Row, raising
from torchrec.distributed.planner import Topology

from torch_dynemb.torchrec import (
    DynamicEmbeddingShardingPlanner,
    DynamicTableConstraints,
    TableOptions,
)
from torch_dynemb.torchrec.dynamicemb.options import (
    DynamicEmbInitializerArgs,
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilisticAdmissionStrategy,
)
from torch_dynemb.torchrec.dynamicemb.options import DynamicEmbInitializerMode as Mode

ROWS: list[Row] = [
    *raising(
        ValueError,
        (
            lambda: DynamicTableConstraints(TableOptions(), compute_kernels=["fused"]),
            r"compute_kernels is \['fused'\], expected none: the tab",
        ),
        (
            lambda: DynamicTableConstraints(TableOptions(), key_value_params=object()),
            "key_value_params is for TorchRec's own key-value kern",
        ),
        (
            lambda: DynamicEmbInitializerArgs(Mode.TRUNCATED_NORMAL, mean=5.0, std_dev=0.1),
            r"lower is None and upper None.*\[-1.0, 1.0\] holds",
        ),
        (lambda: FrequencyAdmissionStrategy(-1), r"FrequencyAdmissionStrategy: threshold is -1"),
        (
            lambda: ProbabilisticAdmissionStrategy(1.5),
            r"probability is 1\.5, expected a number f",
        ),
        (lambda: KVCounter(0), r"KVCounter: capacity is 0, expected at least 1"),
        (lambda: KVCounter(9, key_type=torch.int32), r"KVCounter: key_type is torch.int32, exp"),
    ),
    *raising(
        TypeError,
        (
            lambda: DynamicEmbeddingShardingPlanner(Topology(1, "cpu")),
            "eb_configs is a Topology, expected configs of tables: give it as topology=",
        ),
        (lambda: DynamicTableConstraints(3), r"options is 3, expected TableOptions\(...\)"),
        (
            lambda: FrequencyAdmissionStrategy(3, initializer_args=0.5),
            r"initializer_args is 0\.5, expected DynamicEmbInitiali",
        ),
        (
            lambda: FrequencyAdmissionStrategy(3, DynamicEmbInitializerArgs()),
            r"counter is DynamicEmbInit.*expected KVCounter.*give initializer_args by name",
        ),
        (
            lambda: ProbabilisticAdmissionStrategy("0.5"),
            r"ProbabilisticAdmissionStrategy: probability is .0\.5., expected a number",
        ),
        (
            lambda: DynamicEmbInitializerArgs("uniform"),
            "mode is 'uniform', expected a DynamicEmbInitializerMode",
        ),
        (lambda: FrequencyAdmissionStrategy(1.5), r"FrequencyAdmissionStrategy: threshold is 1.5"),
    ),
    *raising(
        NotImplementedError,
        (
            lambda: DynamicEmbInitializerArgs(Mode.DEBUG),
            r"mode is DEBUG.*choose CONSTANT or UNIFORM",
        ),
    ),
]
