"""What is saved of sharded tables, and how other ranks load it."""
