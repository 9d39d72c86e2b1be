"""Target attention over click histories, with ragged features in one EmbeddingEngine.

Run it with ``python -m tutorials.sequence_model --help``.
"""
