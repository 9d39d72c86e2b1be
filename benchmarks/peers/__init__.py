"""Peers that torch_dynemb is measured against."""
