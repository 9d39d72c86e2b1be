"""What steps.py measures, a module a stage."""
