"""What torch_dynemb is measured against."""
