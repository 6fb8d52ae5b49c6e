from . import functional, initializers
from .autograd import Edge, Node, ParameterEdge
from .layers import Embedding, LayerNorm, Linear

__all__ = ["Edge", "Embedding", "LayerNorm", "Linear", "Node", "ParameterEdge", "functional", "initializers"]
