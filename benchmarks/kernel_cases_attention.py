"""Cases of `kernels` for attention and for the head with its loss.

Letters: R tokens of a tile, C width, H heads, D = C / H, V rows of a vocabulary tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from kernel_case import Array, Case, Set, Shape, arrays, normal, softmax, zeros

from tiles.kernels import Pair, kernel
from tiles.kernels import attention_scratch_nbytes as attention_scratch
from tiles.kernels import loss_scratch_nbytes as head_scratch

aten = torch.ops.aten


class Attention:
    """Causal attention of one tile, forward and backward: ours, torch's and NumPy's."""

    def __init__(self, shape: Shape) -> None:
        self.tokens, self.width, self.num_heads = r, c, h = shape.tokens, shape.width, shape.num_heads
        self.head_size = d = c // h
        self.kernels = [kernel(op, "cpu") for op in ("attention", "attention_delta", "attention_backward")]
        self.at = Pair(d, d**-0.5, True, 0, 0, 0, 0, h, r)
        self.scratch = np.zeros(attention_scratch(r, r, 4), np.uint8)
        self.later = np.triu(np.ones((r, r), np.bool_), 1)

    def split(self, x: Any) -> Any:
        """Return a tensor by heads: (1, R, C) -> (1, H, R, D)."""
        return x.view(1, self.tokens, self.num_heads, self.head_size).transpose(1, 2)

    def heads(self, x: Array) -> Array:
        """Return an array by heads: (1, R, C) -> (H, R, D)."""
        return x.reshape(self.tokens, self.num_heads, self.head_size).transpose(1, 0, 2)

    def make(self, g: np.random.Generator) -> Set:
        """Return a set of arrays, with the forward pass done."""
        r, c, h = self.tokens, self.width, self.num_heads
        given = {name: normal(g, 1, r, c) for name in ("q", "k", "v", "do")}
        found = arrays(**given, o=zeros(1, r, c), peak=zeros(1, h, r), total=zeros(1, h, r), lse=zeros(1, h, r), delta=zeros(1, h, r))
        found |= arrays(dq=zeros(1, r, c), dk=zeros(1, r, c), dv=zeros(1, r, c))
        self.ours(found)
        return found

    def ours(self, s: Set) -> None:
        """Compute the forward pass by nntask's kernel."""
        forward = self.kernels[0]
        forward(s["q"], s["k"], s["v"], s["o"], s["peak"], s["total"], s["lse"], self.scratch, at=self.at, first=True, last=True)

    def torch(self, s: Set) -> None:
        """Compute the forward pass by torch."""
        o = torch.nn.functional.scaled_dot_product_attention(*(self.split(s[name]) for name in ("q_t", "k_t", "v_t")), is_causal=True)
        s["o_t"] = o.transpose(1, 2).reshape(1, self.tokens, self.width)

    def weights(self, s: Set) -> Array:
        """Return the attention weights by NumPy."""
        scores = self.heads(s["q"]) @ self.heads(s["k"]).transpose(0, 2, 1) * np.float32(self.at.scale)
        scores[:, self.later] = -np.inf
        weights = np.empty_like(scores)
        softmax(scores, weights)
        return weights

    def numpy(self, s: Set) -> None:
        """Compute the forward pass by NumPy."""
        self.heads(s["o"])[...] = self.weights(s) @ self.heads(s["v"])

    def ours_backward(self, s: Set) -> None:
        """Compute the gradients by nntask's kernels."""
        _, delta, backward = self.kernels
        delta(s["o"], s["do"], s["delta"], head_size=self.head_size)
        grads = (s["dq"], s["dk"], s["dv"])
        inputs = (s["q"], s["k"], s["v"], s["do"], s["lse"], s["delta"])
        backward(*inputs, *grads, self.scratch, at=self.at, stored=False, first_k=True, first_q=True)

    def torch_backward(self, s: Set) -> None:
        """Compute the gradients by torch."""
        inputs = [self.split(s[name]) for name in ("do_t", "q_t", "k_t", "v_t", "o_t")]
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, s["lse_t"], 0.0, True, scale=self.at.scale)
        s["dq_t"], s["dk_t"], s["dv_t"] = (grad.transpose(1, 2).reshape(1, self.tokens, self.width) for grad in found)

    def numpy_backward(self, s: Set) -> None:
        """Compute the gradients by NumPy."""
        weights, do, q, k, v = self.weights(s), *(self.heads(s[name]) for name in ("do", "q", "k", "v"))
        slope = do @ v.transpose(0, 2, 1)
        slope = weights * (slope - (weights * slope).sum(-1, keepdims=True)) * np.float32(self.at.scale)
        for name, grad in (("dq", slope @ k), ("dk", slope.transpose(0, 2, 1) @ q), ("dv", weights.transpose(0, 2, 1) @ do)):
            self.heads(s[name])[...] = grad


def attention(shape: Shape) -> Iterator[Case]:
    """Yield attention and its backward pass."""
    of = Attention(shape)
    flops = 2.0 * shape.tokens * shape.tokens * shape.width  # two products, half of the keys
    size = f"{shape.tokens} causal, {shape.num_heads} heads of {of.head_size}"
    yield Case(f"attention, {size}", of.make, of.ours, of.torch, of.numpy, ("o",), flops=flops)
    outputs = ("dq", "dk", "dv")
    yield Case(f"attention backward, {size}", of.make, of.ours_backward, of.torch_backward, of.numpy_backward, outputs, flops=2.5 * flops)


def head(shape: Shape) -> Iterator[Case]:
    """Yield the head with its loss, forward and with gradients."""
    r, c, v = shape.tokens, shape.width, shape.vocab
    forward, finish, backward = (kernel(op, "cpu") for op in ("head_forward", "head_finish", "head_backward"))
    scratch = np.zeros(head_scratch(r, v, 4), np.uint8)
    scale = 1 / r

    def make(g: np.random.Generator) -> Set:
        x, w = normal(g, r, c), 0.05 * normal(g, v, c)
        numbers = {name: zeros(r) for name in ("peak", "total", "picked", "lse")}
        found = arrays(x=x, w=w, ids=g.integers(0, v, r).astype(np.int32), **numbers, loss=np.zeros(1), dx=zeros(r, c), dw=zeros(v, c))
        found["long_t"] = found["ids_t"].long()
        return found

    def ours(s: Set) -> None:
        numbers = [s[name] for name in ("peak", "total", "picked")]
        forward(s["x"], s["w"], s["ids"], *numbers, scratch, num_c=1, v_start=0, vocab=v, first=True)
        finish(s["ids"], *numbers, s["lse"], s["loss"], scale=scale)

    def both(s: Set) -> None:
        ours(s)
        constants = {"num_c": 1, "v_start": 0, "scale": scale, "first": True, "accumulate": False}
        backward(s["x"], s["w"], s["ids"], s["lse"], s["dx"], s["dw"], scratch, **constants)

    def theirs(s: Set) -> None:
        s["loss_t"] = torch.nn.functional.cross_entropy(s["x_t"] @ s["w_t"].T, s["long_t"]).reshape(1)

    def both_theirs(s: Set) -> None:
        x, w = s["x_t"].detach().requires_grad_(), s["w_t"].detach().requires_grad_()
        torch.nn.functional.cross_entropy(x @ w.T, s["long_t"]).backward()
        s["dx_t"], s["dw_t"] = x.grad, w.grad

    def numpy_forward(s: Set) -> Array:
        logits = s["x"] @ s["w"].T
        weights = np.empty_like(logits)
        softmax(logits, weights)
        s["loss"][...] = -np.log(weights[np.arange(r), s["ids"]]).mean()
        return weights

    def numpy_both(s: Set) -> None:
        weights = numpy_forward(s)
        weights[np.arange(r), s["ids"]] -= 1
        weights /= r
        s["dx"][...], s["dw"][...] = weights @ s["w"], weights.T @ s["x"]

    product = 2.0 * r * c * v
    yield Case(f"head and loss, {r} x {c} x {v}", make, ours, theirs, numpy_forward, ("loss",), flops=product)
    name = f"head and loss with gradients, {r} x {c} x {v}"
    yield Case(name, make, both, both_theirs, numpy_both, ("dx", "dw"), flops=3 * product)
