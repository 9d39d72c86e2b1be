"""Loading of checkpoints into models."""
