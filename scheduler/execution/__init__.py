"""The machine's actions carried out on real workers: the executor, its workers, waiting threads, and traces."""
