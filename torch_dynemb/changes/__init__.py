"""Changes of tables: the records of delta logs and increments."""
