"""Hugging Face model directories: read tile by tile, and written, without torch or transformers."""
