"""What ops.py times: calls of single ops, and the ops that are left out."""
