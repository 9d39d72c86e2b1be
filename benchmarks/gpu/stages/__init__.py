"""Stages of steps.py, a module for each."""
