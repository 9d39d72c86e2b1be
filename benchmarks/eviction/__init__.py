"""Victims of eviction and admitted ids, against exact simulations."""
