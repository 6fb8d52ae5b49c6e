"""Fused tasks: neighbouring tasks of a recorded step that run as one, on GPUs as a CUDA graph and on CPUs as groups of small tasks."""
