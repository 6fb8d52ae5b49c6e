from .allocator import give_back_freed, reuse_freed_memory
from .flops import FlopCounts, flop_counts_of, gemm_peak, known_gemm_peak
from .gpus import GpuPlan, cards, open_nccl, without_nccl
from .imaginary import BOUNDLESS, coarse_tiling, imaginary_machine, parse_devices
from .machine_model import DISK, RAM, MachineModel, durations, memory_bandwidth, open_store, pace_on, this_machine
from .machine_spec import Budget, MachineSpec, check_budgets, devices_of, free_bytes, machine_of, with_budgets
from .memory_advice import is_device
from .runtimes import FAILURES, as_user_error, open_runtime, runtime_for

__all__ = [
    "BOUNDLESS",
    "DISK",
    "FAILURES",
    "RAM",
    "Budget",
    "FlopCounts",
    "GpuPlan",
    "MachineModel",
    "MachineSpec",
    "as_user_error",
    "cards",
    "check_budgets",
    "coarse_tiling",
    "devices_of",
    "durations",
    "flop_counts_of",
    "free_bytes",
    "gemm_peak",
    "give_back_freed",
    "imaginary_machine",
    "is_device",
    "known_gemm_peak",
    "machine_of",
    "memory_bandwidth",
    "open_nccl",
    "open_runtime",
    "open_store",
    "pace_on",
    "parse_devices",
    "reuse_freed_memory",
    "runtime_for",
    "this_machine",
    "with_budgets",
    "without_nccl",
]
