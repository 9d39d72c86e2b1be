"""``torch_dynemb.torchrec``, and names of DynamicEmb."""

from __future__ import annotations

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
    ),
    *raising(
        TypeError,
        (
            lambda: DynamicEmbeddingShardingPlanner(Topology(1, "cpu")),
            "eb_configs is a Topology, expected configs of tables: give it as topology=",
        ),
        (lambda: DynamicTableConstraints(3), r"options is 3, expected TableOptions\(...\)"),
        (
            lambda: FrequencyAdmissionStrategy(3, 0.5),
            r"initializer_args is 0\.5, expected DynamicEmbInitiali",
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
