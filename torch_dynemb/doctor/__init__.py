"""Check of this machine for the library: ``python -m torch_dynemb doctor``."""
