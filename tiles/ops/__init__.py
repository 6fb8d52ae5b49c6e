"""Tile operations: a pure shape rule, then the loop that emits tasks."""
