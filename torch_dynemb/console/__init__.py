"""Lines of reports, and progress, on a terminal."""
