"""Doors to other software."""
