"""What ranks that share tables have in common."""
