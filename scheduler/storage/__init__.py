"""Memory of nodes: one arena per node, taken once, so that no allocation happens while tasks run."""

from .arena import HostArena
from .tier import UNLIMITED, DiskTier

__all__ = ["UNLIMITED", "DiskTier", "HostArena"]
