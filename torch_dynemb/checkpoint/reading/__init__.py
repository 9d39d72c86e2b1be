"""Reads what checkpoints hold, without a model."""
