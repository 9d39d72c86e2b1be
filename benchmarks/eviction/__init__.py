"""Whom eviction takes, and which ids admission lets in, against exact simulations."""
