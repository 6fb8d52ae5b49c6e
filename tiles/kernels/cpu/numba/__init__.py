"""Loops compiled by Numba at their first call and cached on disk."""
