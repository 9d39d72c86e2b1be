"""Files of tensors with checksums, and the file system below them."""
