"""Parts of ops.py: calls of single ops, and the ops that are left out."""
