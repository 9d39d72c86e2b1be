"""The compiled library of ops, and Python's additions to them."""
