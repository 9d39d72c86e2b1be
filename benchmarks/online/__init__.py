"""Programs of ``freshness.py``: events, a trainer that publishes, a server that follows."""
