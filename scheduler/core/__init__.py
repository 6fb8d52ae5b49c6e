"""The scheduling core: events in, actions out. No threads, clocks, I/O or arrays."""
