"""Kernels: plain functions on arrays, one table for all backends."""
