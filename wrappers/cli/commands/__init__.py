"""The commands, one module each with `run(argv) -> exit code`, imported when the command is called."""
