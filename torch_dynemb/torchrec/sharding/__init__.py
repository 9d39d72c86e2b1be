"""Exchange of ids and rows between ranks, and the kernels of dynamic tables."""
