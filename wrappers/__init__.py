"""Front ends of nntask and its connections to other software."""
