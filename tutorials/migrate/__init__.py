"""From other ways to keep embedding tables to torch_dynemb: one program for each."""
