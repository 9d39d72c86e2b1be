"""What serving.py measures: models, their packages, and a program that runs them from C++."""
