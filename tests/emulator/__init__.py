"""Runs the CUDA kernels of csrc/cuda on the CPU; see README.md beside this file."""
