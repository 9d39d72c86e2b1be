"""Tools for checkpoints without a model: resharding, merging, export, commands."""
