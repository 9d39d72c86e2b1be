"""Gives a model what a checkpoint holds."""
