"""The cases of `kernels`: each kernel that training a GPT-2 uses, beside the torch operation and the NumPy expression for the same thing.

A case makes sets of arrays and has three actions on a set: ours, torch's and NumPy's. torch writes into given outputs where it has such an
overload, and makes its outputs anew where it has none. `nbytes` is what must move: each input read once and each output written once (an
accumulator both), without write-allocation. Cases without it are bound by arithmetic; `flops` is theirs, masked keys not counted.

Letters: R tokens of a tile, C width, I inner width, H heads, D = C / H, V rows of a vocabulary tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch

from tiles.kernels import Pair, kernel
from tiles.kernels import attention_scratch_nbytes as attention_scratch
from tiles.kernels import loss_scratch_nbytes as head_scratch

Array = npt.NDArray[Any]
Set = dict[str, Any]
Action = Callable[[Set], object]

aten = torch.ops.aten
_LR = 1e-3


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the tiles."""

    tokens: int
    width: int
    inner: int
    num_heads: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel beside its peers.

    Args:
        name: how tables call it.
        make: one set of arrays, as NumPy arrays and, under the same name with "_t", tensors over the same memory.
        ours, torch, numpy: what is timed.
        checked: names of the outputs that ours and torch must agree on; ours goes first, from the same contents.
        nbytes: bytes that must move; 0 where arithmetic binds.
        flops: floating-point operations, for those.
    """

    name: str
    make: Callable[[np.random.Generator], Set]
    ours: Action
    torch: Action
    numpy: Action
    checked: tuple[str, ...]
    nbytes: int = 0
    flops: float = 0.0


def _set(**arrays: Any) -> Set:
    """Arrays with tensors over the same memory."""
    tensors = {
        f"{name}_t": torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype == ml_dtypes.bfloat16 else torch.from_numpy(array)
        for name, array in arrays.items()
        if isinstance(array, np.ndarray) and array.dtype not in (np.uint8, np.uint64)
    }
    return arrays | tensors


def _normal(generator: np.random.Generator, *shape: int) -> Array:
    return generator.standard_normal(shape, np.float32)


def _zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def cases(shape: Shape) -> list[Case]:
    """All cases at these sizes."""
    return [*_elementwise(shape), *_norms(shape), *_sums(shape), *_tables(shape), _adamw(shape), *_attention(shape), *_head(shape)]


def _elementwise(shape: Shape) -> Iterator[Case]:
    r, c, i = shape.tokens, shape.width, shape.inner
    gelu, slope, add, copy = (kernel(op, "cpu") for op in ("activation", "activation_backward", "add", "copy"))
    dropout, accumulate, add_rows = (kernel(op, "cpu") for op in ("dropout", "accumulate", "add_rows"))
    key = np.array([1, 2], np.uint64)
    yield Case(
        f"gelu, {r} x {i}",
        lambda g: _set(x=_normal(g, r, i), y=_zeros(r, i)),
        lambda s: gelu(s["x"], s["y"], kind="gelu_new"),
        lambda s: aten.gelu.out(s["x_t"], approximate="tanh", out=s["y_t"]),
        lambda s: np.copyto(s["y"], 0.5 * s["x"] * (1 + np.tanh(0.7978845608 * (s["x"] + 0.044715 * s["x"] * s["x"] * s["x"])))),
        ("y",),
        8 * r * i,
    )
    yield Case(
        f"gelu backward, {r} x {i}",
        lambda g: _set(x=_normal(g, r, i), dy=_normal(g, r, i), dx=_zeros(r, i)),
        lambda s: slope(s["x"], s["dy"], s["dx"], kind="gelu_new"),
        lambda s: aten.gelu_backward.grad_input(s["dy_t"], s["x_t"], approximate="tanh", grad_input=s["dx_t"]),
        lambda s: np.copyto(s["dx"], s["dy"] * _slope(s["x"])),
        ("dx",),
        12 * r * i,
    )
    yield Case(
        f"residual add, {r} x {c}",
        lambda g: _set(a=_normal(g, r, c), b=_normal(g, r, c), y=_zeros(r, c)),
        lambda s: add(s["a"], s["b"], s["y"]),
        lambda s: torch.add(s["a_t"], s["b_t"], out=s["y_t"]),
        lambda s: np.copyto(s["y"], s["a"] + s["b"]),
        ("y",),
        12 * r * c,
    )
    yield Case(
        f"add positions, {r} x {c}",
        lambda g: _set(a=_normal(g, 1, r, c), b=_normal(g, r, c), y=_zeros(1, r, c)),
        lambda s: add_rows(s["a"], s["b"], s["y"]),
        lambda s: torch.add(s["a_t"], s["b_t"], out=s["y_t"]),
        lambda s: np.copyto(s["y"], s["a"] + s["b"]),
        ("y",),
        12 * r * c,
    )
    yield Case(
        f"accumulate a gradient, {c} x {i}",
        lambda g: _set(total=_normal(g, c, i), part=_normal(g, c, i)),
        lambda s: accumulate(s["total"], s["part"]),
        lambda s: s["total_t"].add_(s["part_t"]),
        lambda s: np.copyto(s["total"], s["total"] + s["part"]),
        ("total",),
        12 * c * i,
    )
    yield Case(
        f"dropout, {r} x {c}",
        lambda g: _set(x=_normal(g, r, c), y=_zeros(r, c)),
        lambda s: dropout(s["x"], key, s["y"], p=0.1, stream=1, shape=(r, c), origin=(0, 0)),
        lambda s: torch.nn.functional.dropout(s["x_t"], 0.1, True),
        lambda s: np.copyto(s["y"], s["x"] * (np.random.default_rng(1).random((r, c), np.float32) >= 0.1) / 0.9),
        (),
        8 * r * c,
    )
    for name, source, target, nbytes in (
        ("copy", np.float32, np.float32, 8),
        ("bf16 to fp32", ml_dtypes.bfloat16, np.float32, 6),
        ("fp32 to bf16", np.float32, ml_dtypes.bfloat16, 6),
    ):
        yield Case(
            f"{name}, {r} x {i}",
            lambda g, source=source, target=target: _set(x=_normal(g, r, i).astype(source), y=_zeros(r, i).astype(target)),  # type: ignore[misc]
            lambda s: copy(s["x"], s["y"]),
            lambda s: s["y_t"].copy_(s["x_t"]),
            lambda s: np.copyto(s["y"], s["x"].astype(s["y"].dtype)),
            ("y",),
            nbytes * r * i,
        )


def _slope(x: Array) -> Array:
    t = np.tanh(0.7978845608 * (x + 0.044715 * x * x * x))
    found: Array = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608 * (1 + 3 * 0.044715 * x * x)
    return found


def _norms(shape: Shape) -> Iterator[Case]:
    r, c = shape.tokens, shape.width
    norm, residual, backward, softmax, slope = (
        kernel(op, "cpu") for op in ("layer_norm", "residual_layer_norm", "layer_norm_backward", "softmax", "softmax_backward")
    )

    def plain(x: Array, s: Set) -> Array:
        found: Array = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * s["gamma"] + s["beta"]
        return found

    def norm_set(g: np.random.Generator) -> Set:
        moments = {"mean": _zeros(r), "rstd": _zeros(r)}
        arrays = {name: _normal(g, r, c) for name in ("x", "r")} | {name: _normal(g, c) for name in ("gamma", "beta")}
        return _set(**arrays, sum=_zeros(r, c), y=_zeros(r, c), **moments)

    def torch_norm(s: Set) -> None:
        s["y_t"] = aten.native_layer_norm(s["x_t"], [c], s["gamma_t"], s["beta_t"], 1e-5)[0]

    def torch_residual(s: Set) -> None:
        torch.add(s["x_t"], s["r_t"], out=s["sum_t"])
        s["y_t"] = aten.native_layer_norm(s["sum_t"], [c], s["gamma_t"], s["beta_t"], 1e-5)[0]

    def numpy_residual(s: Set) -> None:
        s["sum"][...] = s["x"] + s["r"]
        s["y"][...] = plain(s["sum"], s)

    yield Case(
        f"layer norm, {r} x {c}",
        norm_set,
        lambda s: norm(s["x"], s["gamma"], s["beta"], s["y"], s["mean"], s["rstd"], eps=1e-5),
        torch_norm,
        lambda s: np.copyto(s["y"], plain(s["x"], s)),
        ("y",),
        8 * r * c,
    )
    yield Case(
        f"residual and layer norm, {r} x {c}",
        norm_set,
        lambda s: residual(s["x"], s["r"], s["gamma"], s["beta"], s["sum"], s["y"], s["mean"], s["rstd"], eps=1e-5),
        torch_residual,
        numpy_residual,
        ("sum", "y"),
        16 * r * c,
    )

    def backward_set(g: np.random.Generator) -> Set:
        x = _normal(g, r, c)
        mean, rstd = x.mean(1, keepdims=True), 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        found = _set(x=x, dy=_normal(g, r, c), gamma=_normal(g, c), beta=_normal(g, c), mean=mean, rstd=rstd)
        return found | _set(dx=_zeros(r, c), dgamma=_zeros(c), dbeta=_zeros(c))

    def torch_backward(s: Set) -> None:
        s["dx_t"], s["dgamma_t"], s["dbeta_t"] = aten.native_layer_norm_backward(
            s["dy_t"], s["x_t"], [c], s["mean_t"], s["rstd_t"], s["gamma_t"], s["beta_t"], [True] * 3
        )

    def numpy_backward(s: Set) -> None:
        xhat, scaled = (s["x"] - s["mean"]) * s["rstd"], s["dy"] * s["gamma"]
        s["dgamma"][...], s["dbeta"][...] = (s["dy"] * xhat).sum(0), s["dy"].sum(0)
        s["dx"][...] = s["rstd"] * (scaled - scaled.mean(1, keepdims=True) - xhat * (scaled * xhat).mean(1, keepdims=True))

    yield Case(
        f"layer norm backward, {r} x {c}",
        backward_set,
        lambda s: backward(s["x"], s["gamma"], s["mean"], s["rstd"], s["dy"], s["dx"], s["dgamma"], s["dbeta"], accumulate=False, residual=False),
        torch_backward,
        numpy_backward,
        ("dx", "dgamma", "dbeta"),
        12 * r * c,
    )
    yield Case(
        f"softmax, {r} x {r}",
        lambda g: _set(x=_normal(g, r, r), y=_zeros(r, r)),
        lambda s: softmax(s["x"], s["y"]),
        lambda s: aten._softmax.out(s["x_t"], -1, False, out=s["y_t"]),
        lambda s: _softmax(s["x"], s["y"]),
        ("y",),
        8 * r * r,
    )
    yield Case(
        f"softmax backward, {r} x {r}",
        lambda g: _set(y=np.abs(_normal(g, r, r)) / r, dy=_normal(g, r, r), dx=_zeros(r, r)),
        lambda s: slope(s["y"], s["dy"], s["dx"]),
        lambda s: aten._softmax_backward_data.out(s["dy_t"], s["y_t"], -1, torch.float32, grad_input=s["dx_t"]),
        lambda s: np.copyto(s["dx"], s["y"] * (s["dy"] - (s["y"] * s["dy"]).sum(1, keepdims=True))),
        ("dx",),
        12 * r * r,
    )


def _softmax(x: Array, y: Array) -> None:
    e = np.exp(x - x.max(-1, keepdims=True))
    y[...] = e / e.sum(-1, keepdims=True)


def _sums(shape: Shape) -> Iterator[Case]:
    r, i = shape.tokens, shape.inner
    columns, squares = kernel("column_sums", "cpu"), kernel("sum_squares", "cpu")
    yield Case(
        f"bias gradient: column sums, {r} x {i}",
        lambda g: _set(dy=_normal(g, r, i), db=_zeros(i)),
        lambda s: columns(s["dy"], s["db"], accumulate=False),
        lambda s: torch.sum(s["dy_t"], 0, out=s["db_t"]),
        lambda s: np.copyto(s["db"], s["dy"].sum(0)),
        ("db",),
        4 * r * i,
    )
    yield Case(
        f"sum of squares, {r} x {i}",
        lambda g: _set(x=_normal(g, r, i), out=np.zeros(1)),
        lambda s: squares(s["x"], s["out"]),
        lambda s: torch.linalg.vector_norm(s["x_t"]),
        lambda s: np.copyto(s["out"], (s["x"] * s["x"]).sum()),
        (),
        4 * r * i,
    )


def _tables(shape: Shape) -> Iterator[Case]:
    r, c, v = shape.tokens, shape.width, shape.vocab
    take, add = kernel("embedding", "cpu"), kernel("embedding_backward", "cpu")

    def torch_add(s: Set) -> None:
        s["dtable_t"] = aten.embedding_dense_backward(s["dy_t"], s["ids_t"], v, -1, False)

    def numpy_add(s: Set) -> None:
        s["dtable"][...] = 0
        np.add.at(s["dtable"], s["ids"], s["dy"])

    yield Case(
        f"embedding, {r} of {v} x {c}",
        lambda g: _set(ids=g.integers(0, v, r).astype(np.int32), table=_normal(g, v, c), x=_zeros(r, c)),
        lambda s: take(s["ids"], s["table"], s["x"], v_start=0, vocab=2 * v, accumulate=False),
        lambda s: torch.index_select(s["table_t"], 0, s["ids_t"], out=s["x_t"]),
        lambda s: np.copyto(s["x"], s["table"][s["ids"]]),
        ("x",),
        8 * r * c,
    )
    yield Case(
        f"embedding backward, {r} into {v} x {c}",
        lambda g: _set(ids=g.integers(0, v, r).astype(np.int32), dy=_normal(g, r, c), dtable=_zeros(v, c)),
        lambda s: add(s["ids"], s["dy"], s["dtable"], v_start=0, accumulate=False),
        torch_add,
        numpy_add,
        ("dtable",),
        4 * v * c + 12 * r * c,
    )


def _adamw(shape: Shape) -> Case:
    c, i = shape.width, shape.inner
    adam = kernel("adam", "cpu")
    hyper = np.array([[_LR, 0.1, 0.05, 0.9, 0.95, 1e-8, 0.1, 0.0]])
    step = torch.tensor(1.0)

    def torch_adamw(s: Set) -> None:
        lists = [[s[name]] for name in ("p_t", "grad_t", "m_t", "v_t")]
        aten._fused_adamw_(*lists, [], [step], lr=_LR, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)

    def numpy_adamw(s: Set) -> None:
        s["m"][...] = 0.9 * s["m"] + 0.1 * s["grad"]
        s["v"][...] = 0.95 * s["v"] + 0.05 * s["grad"] * s["grad"]
        s["p"][...] = (1 - _LR * 0.1) * s["p"] - _LR / 0.1 * s["m"] / (np.sqrt(s["v"] / 0.05) + 1e-8)

    return Case(
        f"AdamW, {c} x {i}",
        lambda g: _set(p=_normal(g, c, i), grad=_normal(g, c, i), m=_normal(g, c, i), v=np.abs(_normal(g, c, i))),
        lambda s: adam(s["p"], s["grad"], s["m"], s["v"], hyper, row=0, decoupled=True, max_norm=0.0, clip=False, master=False),
        torch_adamw,
        numpy_adamw,
        ("p", "m", "v"),
        28 * c * i,
    )


def _attention(shape: Shape) -> Iterator[Case]:
    r, c, h = shape.tokens, shape.width, shape.num_heads
    d = c // h
    forward, delta, backward = (kernel(op, "cpu") for op in ("attention", "attention_delta", "attention_backward"))
    at = Pair(d, d**-0.5, True, 0, 0, 0, 0, h, r)
    scratch = np.zeros(attention_scratch(r, r, 4), np.uint8)
    later = np.triu(np.ones((r, r), np.bool_), 1)

    def split(x: Any) -> Any:
        return x.view(1, r, h, d).transpose(1, 2)  # (1, R, C) -> (1, H, R, D)

    def heads(x: Array) -> Array:
        return x.reshape(r, h, d).transpose(1, 0, 2)

    def make(g: np.random.Generator) -> Set:
        arrays = {name: _normal(g, 1, r, c) for name in ("q", "k", "v", "do")}
        found = _set(**arrays, o=_zeros(1, r, c), peak=_zeros(1, h, r), total=_zeros(1, h, r), lse=_zeros(1, h, r), delta=_zeros(1, h, r))
        found |= _set(dq=_zeros(1, r, c), dk=_zeros(1, r, c), dv=_zeros(1, r, c))
        ours(found)
        return found

    def ours(s: Set) -> None:
        forward(s["q"], s["k"], s["v"], s["o"], s["peak"], s["total"], s["lse"], scratch, at=at, first=True, last=True)

    def theirs(s: Set) -> None:
        o = torch.nn.functional.scaled_dot_product_attention(split(s["q_t"]), split(s["k_t"]), split(s["v_t"]), is_causal=True)
        s["o_t"] = o.transpose(1, 2).reshape(1, r, c)

    def numpy_weights(s: Set) -> Array:
        scores = heads(s["q"]) @ heads(s["k"]).transpose(0, 2, 1) * np.float32(at.scale)
        scores[:, later] = -np.inf
        weights = np.empty_like(scores)
        _softmax(scores, weights)
        return weights

    def numpy_forward(s: Set) -> None:
        s["o"].reshape(r, h, d)[...] = (numpy_weights(s) @ heads(s["v"])).transpose(1, 0, 2)

    flops = 2.0 * r * r * c  # two products, half of the keys
    yield Case(f"attention, {r} causal, {h} heads of {d}", make, ours, theirs, numpy_forward, ("o",), flops=flops)

    def ours_backward(s: Set) -> None:
        delta(s["o"], s["do"], s["delta"], head_size=d)
        grads = (s["dq"], s["dk"], s["dv"])
        backward(s["q"], s["k"], s["v"], s["do"], s["lse"], s["delta"], *grads, scratch, at=at, stored=False, first_k=True, first_q=True)

    def torch_backward(s: Set) -> None:
        inputs = [split(s[name]) for name in ("do_t", "q_t", "k_t", "v_t", "o_t")]
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, s["lse_t"], 0.0, True, scale=at.scale)
        s["dq_t"], s["dk_t"], s["dv_t"] = (grad.transpose(1, 2).reshape(1, r, c) for grad in found)

    def numpy_backward(s: Set) -> None:
        weights, do, q, k, v = numpy_weights(s), *(heads(s[name]) for name in ("do", "q", "k", "v"))
        slope = do @ v.transpose(0, 2, 1)
        slope = weights * (slope - (weights * slope).sum(-1, keepdims=True)) * np.float32(at.scale)
        for name, grad in (("dq", slope @ k), ("dk", slope.transpose(0, 2, 1) @ q), ("dv", weights.transpose(0, 2, 1) @ do)):
            s[name].reshape(r, h, d)[...] = grad.transpose(1, 0, 2)

    name = f"attention backward, {r} causal, {h} heads of {d}"
    yield Case(name, make, ours_backward, torch_backward, numpy_backward, ("dq", "dk", "dv"), flops=2.5 * flops)


def _head(shape: Shape) -> Iterator[Case]:
    r, c, v = shape.tokens, shape.width, shape.vocab
    forward, finish, backward = (kernel(op, "cpu") for op in ("head_forward", "head_finish", "head_backward"))
    scratch = np.zeros(head_scratch(r, v, 4), np.uint8)
    scale = 1 / r

    def make(g: np.random.Generator) -> Set:
        x, w = _normal(g, r, c), 0.05 * _normal(g, v, c)
        numbers = {name: _zeros(r) for name in ("peak", "total", "picked", "lse")}
        found = _set(x=x, w=w, ids=g.integers(0, v, r).astype(np.int32), **numbers, loss=np.zeros(1), dx=_zeros(r, c), dw=_zeros(v, c))
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
        _softmax(logits, weights)
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
