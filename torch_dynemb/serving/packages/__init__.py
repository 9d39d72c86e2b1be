"""Packages of served models: compiled code, and beside it the tables that it reads."""
