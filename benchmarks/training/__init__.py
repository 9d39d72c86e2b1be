"""Training steps of one table: sizes, batches, our variants, static peers, bytes of an id."""
