from .virtual_time import Duration, Simulation, simulate

__all__ = ["Duration", "Simulation", "simulate"]
