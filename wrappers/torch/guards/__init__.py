"""Guards: the state of Python that a capture reads, as one comparable value, and tensors whose values a session holds."""
