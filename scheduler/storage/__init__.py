"""Memory of nodes: one arena per node, taken once, so that no allocation happens while tasks run."""

from .arena import HostArena
from .tier import DiskTier

__all__ = ["DiskTier", "HostArena"]
