"""Readers of checkpoints without a model."""
