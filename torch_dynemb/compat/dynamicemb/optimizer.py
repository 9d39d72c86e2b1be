"""Types of optimizers, as in ``dynamicemb.optimizer``."""

from fbgemm_gpu.split_embedding_configs import EmbOptimType

from torch_dynemb.compat.dynamicemb.not_offered import refusing
from torch_dynemb.torchrec.dynamicemb.sizes import convert_optimizer_type, get_optimizer_state_dim
from torch_dynemb.torchrec.planning.fused_params import DynamicEmbOptimType

__getattr__ = refusing(__name__)

__all__ = [
    "DynamicEmbOptimType",
    "EmbOptimType",
    "convert_optimizer_type",
    "get_optimizer_state_dim",
]
