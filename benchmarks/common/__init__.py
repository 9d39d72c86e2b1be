"""Shared parts of benchmarks: clock, results, command line, ids.

Programs for the CPU are started as files and import ``common``; those for the GPU are modules of
the repository and import ``benchmarks.common``. So modules in here import each other relatively.
"""
