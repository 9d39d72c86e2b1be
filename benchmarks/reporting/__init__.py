"""Tables and plots of kept results, which ``report.py`` writes into README.md."""
