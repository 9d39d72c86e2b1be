"""What tables need to know of the process that they live in: signals, forks, and what it sends."""
