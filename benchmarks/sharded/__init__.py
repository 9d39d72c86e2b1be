"""Training steps of collections that TorchRec shards over ranks."""
