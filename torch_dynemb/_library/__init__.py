"""The compiled library of ops, and what Python adds to them."""
