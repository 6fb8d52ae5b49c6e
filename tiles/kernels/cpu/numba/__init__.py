"""Loops compiled by Numba at their first call and kept on disk."""
