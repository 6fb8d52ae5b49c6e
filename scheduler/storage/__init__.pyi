from .arena import HostArena
from .device import DeviceMemory
from .limits import default_ram_budget, memory_budgets, memory_limit
from .performance_store import PerfStore, machine_fingerprint
from .tier import DiskTier

__all__ = ["DeviceMemory", "DiskTier", "HostArena", "PerfStore", "default_ram_budget", "machine_fingerprint", "memory_budgets", "memory_limit"]
