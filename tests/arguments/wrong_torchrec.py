"""``torch_dynemb.torchrec``, and names of DynamicEmb."""

from __future__ import annotations

from refusing import Row

from torch_dynemb.torchrec import DynamicTableConstraints, TableOptions
from torch_dynemb.torchrec.dynamicemb.options import (
    DynamicEmbInitializerArgs,
    FrequencyAdmissionStrategy,
)
from torch_dynemb.torchrec.dynamicemb.options import DynamicEmbInitializerMode as Mode

ROWS: list[Row] = [
    (
        lambda: DynamicTableConstraints(TableOptions(), compute_kernels=["fused"]),
        ValueError,
        r"compute_kernels is \['fused'\], expected none: the tab",
    ),
    (
        lambda: DynamicTableConstraints(TableOptions(), key_value_params=object()),
        ValueError,
        "key_value_params is for TorchRec's own key-value kern",
    ),
    (lambda: DynamicTableConstraints(3), TypeError, r"options is 3, expected TableOptions\(...\)"),
    (
        lambda: DynamicEmbInitializerArgs(Mode.DEBUG),
        NotImplementedError,
        r"mode is DEBUG.*choose CONSTANT or UNIFORM",
    ),
    (
        lambda: DynamicEmbInitializerArgs(Mode.TRUNCATED_NORMAL, mean=5.0, std_dev=0.1),
        ValueError,
        r"lower is None and upper None.*\[-1.0, 1.0\] holds",
    ),
    (
        lambda: FrequencyAdmissionStrategy(3, 0.5),
        TypeError,
        r"initializer_args is 0\.5, expected DynamicEmbInitiali",
    ),
    (
        lambda: DynamicEmbInitializerArgs("uniform"),
        TypeError,
        "mode is 'uniform', expected a DynamicEmbInitializerMode",
    ),
    (
        lambda: FrequencyAdmissionStrategy(-1),
        ValueError,
        r"FrequencyAdmissionStrategy: threshold is -1",
    ),
    (
        lambda: FrequencyAdmissionStrategy(1.5),
        TypeError,
        r"FrequencyAdmissionStrategy: threshold is 1.5",
    ),
]
