from .store import STATE, Checkpoint, find_checkpoint, step_directories

__all__ = ["STATE", "Checkpoint", "find_checkpoint", "step_directories"]
