"""Reports of runs: the records of a run directory (`records`), the figures computed from them (`figures`), and their page (`page`)."""
