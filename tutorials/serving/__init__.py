"""A model behind HTTP, in Python and in C++."""
