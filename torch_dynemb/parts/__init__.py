"""Parts of tables: those of ranks, kept ids, column shards, merged ids, sketches."""
