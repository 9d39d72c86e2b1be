"""What a checkpoint says of itself, and where it lies."""
