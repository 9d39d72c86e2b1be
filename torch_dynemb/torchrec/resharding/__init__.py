"""Moves of dynamic tables between the shards of two plans, in a running job."""
