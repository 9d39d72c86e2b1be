"""What programs print: lines of reports, and progress."""
