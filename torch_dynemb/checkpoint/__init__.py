"""Saved tables as files."""
