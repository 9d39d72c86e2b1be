"""Files of tensors with checksums, on local disks and at URLs of fsspec."""
