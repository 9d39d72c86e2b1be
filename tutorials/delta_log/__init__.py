"""A delta log in a store of one's own: SQLite."""
