"""Dumps of tables, as in ``dynamicemb.dump_load``."""

from torch_dynemb.compat.dynamicemb.not_offered import refusing
from torch_dynemb.migrate.dynamicemb_calls import DynamicEmbDump, DynamicEmbLoad

__getattr__ = refusing(__name__)

__all__ = ["DynamicEmbDump", "DynamicEmbLoad"]
