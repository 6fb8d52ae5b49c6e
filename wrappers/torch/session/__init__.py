"""Sessions: a module in training, its recorded steps and those in flight, its files, and the comparison with eager PyTorch."""
