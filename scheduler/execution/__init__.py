"""Execution of the machine's actions on real workers: the executor, its workers, waiting threads, and traces."""
