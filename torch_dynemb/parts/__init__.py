"""Parts of tables: those of ranks, descriptions, kept ids, column shards, sketches."""
