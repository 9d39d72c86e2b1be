"""Dynamic tables through TorchRec's DistributedModelParallel."""

from torch_dynemb.torchrec.options import DynamicTableConstraints, TableOptions

__all__ = ["DynamicTableConstraints", "TableOptions"]
