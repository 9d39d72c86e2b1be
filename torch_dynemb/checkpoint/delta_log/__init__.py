"""A log of what training changes, which other models follow."""
