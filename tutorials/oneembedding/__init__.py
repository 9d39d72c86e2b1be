"""DLRM with OneEmbedding's names."""
