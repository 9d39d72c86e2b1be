"""Memory for the tensors of tables: of the CPU, of GPUs, and stores of rows."""
