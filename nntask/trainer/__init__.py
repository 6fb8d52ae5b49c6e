"""Training runs: settings and their rules, the loop, and the files a run leaves behind.

Start with `run.train`; `loop.Loop` is the heart of it. This module imports nothing, so that flags can be checked before NumPy is loaded.
"""
