"""Parts of serving.py: models, their packages, and a program that runs them from C++."""
