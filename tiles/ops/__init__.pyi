from . import attention, cache, elementwise, embedding, loss, matmul, muon, norm, optimizer, pages, random, select, tokens

__all__ = ["attention", "cache", "elementwise", "embedding", "loss", "matmul", "muon", "norm", "optimizer", "pages", "random", "select", "tokens"]
