from .cuda_cupy import (
    CONTEXT_NBYTES,
    INSTALL,
    MOST_PARTITIONS,
    NOT_READY,
    CupyGpu,
    CupyGraph,
    CupyStream,
    GpuFacts,
    choose_gpus,
    connect,
    is_fatal,
    is_out_of_memory,
    name_of,
)
from .disk import THREADS, staging_nbytes
from .gpu import NUM_STARTED, Event, Gpu, NoGpu, Stream
from .nccl import CupyNccl, UniqueId

__all__ = [
    "CONTEXT_NBYTES",
    "INSTALL",
    "MOST_PARTITIONS",
    "NOT_READY",
    "NUM_STARTED",
    "THREADS",
    "CupyGpu",
    "CupyGraph",
    "CupyNccl",
    "CupyStream",
    "Event",
    "Gpu",
    "GpuFacts",
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
