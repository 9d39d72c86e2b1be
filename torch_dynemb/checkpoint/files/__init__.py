"""Files of tensors with checksums, and the file system calls below them."""
