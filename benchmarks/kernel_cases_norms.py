"""Cases of `kernels` for norms.

Letters: R tokens of a tile, C width.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from kernel_case import Array, Case, Set, Shape, arrays, normal, zeros

from tiles.kernels import kernel

aten = torch.ops.aten


def layer_norms(shape: Shape) -> Iterator[Case]:
    """Yield the layer norm, alone and with a residual."""
    r, c = shape.tokens, shape.width
    norm, residual = kernel("layer_norm", "cpu"), kernel("residual_layer_norm", "cpu")

    def plain(x: Array, s: Set) -> Array:
        found: Array = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * s["gamma"] + s["beta"]
        return found

    def norm_set(g: np.random.Generator) -> Set:
        moments = {"mean": zeros(r), "rstd": zeros(r)}
        given = {name: normal(g, r, c) for name in ("x", "r")} | {name: normal(g, c) for name in ("gamma", "beta")}
        return arrays(**given, sum=zeros(r, c), y=zeros(r, c), **moments)

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


def layer_norm_backward(shape: Shape) -> Iterator[Case]:
    """Yield the backward pass of the layer norm."""
    r, c = shape.tokens, shape.width
    backward = kernel("layer_norm_backward", "cpu")

    def backward_set(g: np.random.Generator) -> Set:
        x = normal(g, r, c)
        mean, rstd = x.mean(1, keepdims=True), 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        found = arrays(x=x, dy=normal(g, r, c), gamma=normal(g, c), beta=normal(g, c), mean=mean, rstd=rstd)
        return found | arrays(dx=zeros(r, c), dgamma=zeros(c), dbeta=zeros(c))

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
