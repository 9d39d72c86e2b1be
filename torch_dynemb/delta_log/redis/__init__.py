"""Delta logs and rows in Redis."""
