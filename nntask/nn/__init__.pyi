from . import functional, initializers
from .autograd import Edge, Node, ParameterEdge, Tensor, checkpoint, no_grad, on_tape
from .layers import Dropout, Embedding, LayerNorm, Linear, RMSNorm
from .module import Module, Parameter

__all__ = [
    "Dropout",
    "Edge",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "Node",
    "Parameter",
    "ParameterEdge",
    "RMSNorm",
    "Tensor",
    "checkpoint",
    "functional",
    "initializers",
    "no_grad",
    "on_tape",
]
