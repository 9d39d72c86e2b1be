"""Modules for the further options of ``make train``, one for each group of them."""
