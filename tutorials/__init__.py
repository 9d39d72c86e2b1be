"""Programs that use torch_dynemb from the outside, through its public API only."""
