"""Rows of tables on their way: read, sent to other ranks, and written as a whole or not at all."""
