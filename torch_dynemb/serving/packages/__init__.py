"""Packages of models that are served: compiled code, and beside it the tables that it reads."""
