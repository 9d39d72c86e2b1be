"""Content of a manifest, and the folder of a checkpoint."""
