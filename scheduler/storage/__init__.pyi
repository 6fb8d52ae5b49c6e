from .arena import HostArena
from .cache_folder import replace_file, user_cache
from .device import DeviceMemory
from .file_pages import release_file_pages
from .limits import check_budgets, default_ram_budget, filled_budgets, memory_budgets, memory_limit
from .performance_store import PerfStore, machine_fingerprint
from .tier import DiskTier

__all__ = [
    "DeviceMemory",
    "DiskTier",
    "HostArena",
    "PerfStore",
    "check_budgets",
    "default_ram_budget",
    "filled_budgets",
    "machine_fingerprint",
    "memory_budgets",
    "memory_limit",
    "release_file_pages",
    "replace_file",
    "user_cache",
]
