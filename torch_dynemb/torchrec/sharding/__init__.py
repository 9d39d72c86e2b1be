"""Collections with dynamic tables on several ranks."""
