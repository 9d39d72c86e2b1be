"""Model of a training step on many ranks: bytes, imbalance, memory and time by sharding type."""
