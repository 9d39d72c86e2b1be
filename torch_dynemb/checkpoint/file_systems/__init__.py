"""Places of checkpoints and logs: local paths, and URLs of fsspec."""
