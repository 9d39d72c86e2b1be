"""Log of the changes of training, which other models follow."""
