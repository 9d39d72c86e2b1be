"""Options of dynamic tables, and plans for models that have some."""
