"""Process-wide concerns of tables: signals, forks, and pickling for other processes."""
