"""Where the tensors of tables lie."""
