from . import attention, cache, elementwise, embedding, experts, loss, matmul, muon, norm, optimizer, pages, random, select, tokens

__all__ = [
    "attention",
    "cache",
    "elementwise",
    "embedding",
    "experts",
    "loss",
    "matmul",
    "muon",
    "norm",
    "optimizer",
    "pages",
    "random",
    "select",
    "tokens",
]
