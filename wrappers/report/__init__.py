"""Reports of runs: what a run directory has to say (`records`), as numbers (`figures`), as one page (`page`)."""
