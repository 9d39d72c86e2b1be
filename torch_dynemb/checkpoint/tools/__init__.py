"""What is done with checkpoints on their own: resharding, export, commands."""
