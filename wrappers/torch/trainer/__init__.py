"""Loops around sessions: transformers' Trainer, and language models in ``nntask train`` and ``nntask plan``."""
