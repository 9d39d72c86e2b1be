"""Replay of a stream through tables with several policies and capacities."""
