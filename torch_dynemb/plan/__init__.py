"""Sizes of tables, planned from a sample of ids: ``python -m torch_dynemb plan --help``."""
