"""Build, tests, sanitizer and benchmarks for a machine with a GPU; ``check.py`` runs them."""
