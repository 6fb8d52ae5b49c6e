from .catalog import bf16_kernel, kernel
from .cpu import kernel_versions
from .cpu.attention_blocks import attention_scratch_nbytes
from .cpu.blas import fp32_products, gemm, set_blas_threads
from .cpu.loss import loss_scratch_nbytes
from .cpu.onednn.library import bf16_products, has_bf16_products
from .cpu.optimizer import load_update_loops
from .cpu.quantised import load_block_loops
from .cuda.array import DeviceArray
from .cuda.attention_speed import attention_seconds
from .cuda.compiling import KernelBuildError, source_text
from .cuda.device import SPARE_NBYTES, CudaDevice
from .cuda.hollow import HollowGpu
from .cuda.launch import PARTIALS_NBYTES, KernelSource, StreamPointer, device
from .cuda.library_attention import ATTENTION_WORKSPACE_NBYTES, INSTALL_CUDNN, WholeShape, shape_of, takes_heads
from .cuda.products import WORKSPACE_NBYTES
from .cuda.tables import head_scratch_nbytes
from .reference.attention import Pair
from .reference.buckets import Buckets
from .reference.optimizer import HYPER
from .registry import BF16, NARROW

__all__ = [
    "ATTENTION_WORKSPACE_NBYTES",
    "BF16",
    "HYPER",
    "INSTALL_CUDNN",
    "NARROW",
    "PARTIALS_NBYTES",
    "SPARE_NBYTES",
    "WORKSPACE_NBYTES",
    "Buckets",
    "CudaDevice",
    "DeviceArray",
    "HollowGpu",
    "KernelBuildError",
    "KernelSource",
    "Pair",
    "StreamPointer",
    "WholeShape",
    "attention_scratch_nbytes",
    "attention_seconds",
    "bf16_kernel",
    "bf16_products",
    "device",
    "fp32_products",
    "gemm",
    "has_bf16_products",
    "head_scratch_nbytes",
    "kernel",
    "kernel_versions",
    "load_block_loops",
    "load_update_loops",
    "loss_scratch_nbytes",
    "set_blas_threads",
    "shape_of",
    "source_text",
    "takes_heads",
]
