"""Writers of checkpoints."""
