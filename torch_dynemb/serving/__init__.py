"""Tables that are only read."""

from torch_dynemb.serving.freeze import freeze

__all__ = ["freeze"]
