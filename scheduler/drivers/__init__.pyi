from .cuda_cupy import (
    CONTEXT_NBYTES,
    INSTALL,
    MOST_PARTITIONS,
    CupyGpu,
    CupyGraph,
    GpuFacts,
    NoGpu,
    choose_gpus,
    connect,
    is_fatal,
    is_out_of_memory,
    name_of,
)
from .disk import THREADS, DiskEngine, Marks, staging_nbytes
from .gpu import Event, Gpu, Stream
from .nccl import CupyNccl, Nccl, UniqueId

__all__ = [
    "CONTEXT_NBYTES",
    "INSTALL",
    "MOST_PARTITIONS",
    "THREADS",
    "CupyGpu",
    "CupyGraph",
    "CupyNccl",
    "DiskEngine",
    "Event",
    "Gpu",
    "GpuFacts",
    "Marks",
    "Nccl",
    "NoGpu",
    "Stream",
    "UniqueId",
    "choose_gpus",
    "connect",
    "is_fatal",
    "is_out_of_memory",
    "name_of",
    "staging_nbytes",
]
