"""Records of a run: metrics, TensorBoard events, traces, traffic, explanations of placement, timed loops."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
