"""State dicts of sharded dynamic tables: saving them, and loading on any ranks."""
