from . import functional, initializers
from .autograd import Edge, Node, ParameterEdge, Tensor, checkpoint, no_grad, on_tape
from .layers import Dropout, Embedding, HeadNorm, LayerNorm, Linear, RMSNorm, TransposedLinear
from .module import Module, Parameter

__all__ = [
    "Dropout",
    "Edge",
    "Embedding",
    "HeadNorm",
    "LayerNorm",
    "Linear",
    "Module",
    "Node",
    "Parameter",
    "ParameterEdge",
    "RMSNorm",
    "Tensor",
    "TransposedLinear",
    "checkpoint",
    "functional",
    "initializers",
    "no_grad",
    "on_tape",
]
