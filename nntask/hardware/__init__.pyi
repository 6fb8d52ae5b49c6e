from .allocator import give_back_freed, reuse_freed_memory
from .flops import FlopCounts, flop_counts_of, gemm_peak, known_gemm_peak
from .gpus import GpuPlan, cards, open_nccl, without_nccl
from .imaginary import coarse_tiling
from .machine_model import DISK, RAM, MachineModel, durations, memory_bandwidth, open_store, pace_on, this_machine
from .machine_request import Budget, MachineRequest
from .machine_spec import MachineSpec, check_budgets, free_bytes, requested_devices, with_budgets
from .memory_advice import is_device
from .runtimes import FAILURES, as_user_error, open_runtime

__all__ = [
    "DISK",
    "FAILURES",
    "RAM",
    "Budget",
    "FlopCounts",
    "GpuPlan",
    "MachineModel",
    "MachineRequest",
    "MachineSpec",
    "as_user_error",
    "cards",
    "check_budgets",
    "coarse_tiling",
    "durations",
    "flop_counts_of",
    "free_bytes",
    "gemm_peak",
    "give_back_freed",
    "is_device",
    "known_gemm_peak",
    "memory_bandwidth",
    "open_nccl",
    "open_runtime",
    "open_store",
    "pace_on",
    "requested_devices",
    "reuse_freed_memory",
    "this_machine",
    "with_budgets",
    "without_nccl",
]
