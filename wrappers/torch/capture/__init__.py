"""Capture of a pass over a module: fake tensors, the recording of calls, values that decide, and refusals."""
