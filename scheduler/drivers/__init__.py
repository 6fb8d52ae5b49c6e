"""Drivers that execute the machine's actions: worker threads of CPUs and GPUs, copies between memory nodes, disk I/O, NCCL; callbacks on tasks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
