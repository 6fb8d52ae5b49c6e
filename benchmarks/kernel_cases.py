"""The cases of `kernels`: each kernel that training a GPT-2 uses.

Letters: R tokens of a tile, C width, I inner width, V rows of a vocabulary tile.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import torch
from kernel_case import Array, Case, Set, Shape, arrays, normal, zeros
from kernel_cases_attention import attention, head
from kernel_cases_norms import layer_norm_backward, layer_norms

from tiles.kernels import kernel

aten = torch.ops.aten
_LR = 1e-3


def cases(shape: Shape) -> list[Case]:
    """Return all cases at these sizes."""
    groups = (_gelu, _additions, _copies, layer_norms, layer_norm_backward, _sums, _tables, _adamw, attention, head)
    return [case for group in groups for case in group(shape)]


def _gelu(shape: Shape) -> Iterator[Case]:
    r, i = shape.tokens, shape.inner
    gelu, slope = kernel("activation", "cpu"), kernel("activation_backward", "cpu")
    yield Case(
        f"gelu, {r} x {i}",
        lambda g: arrays(x=normal(g, r, i), y=zeros(r, i)),
        lambda s: gelu(s["x"], s["y"], kind="gelu_new"),
        lambda s: aten.gelu.out(s["x_t"], approximate="tanh", out=s["y_t"]),
        lambda s: np.copyto(s["y"], 0.5 * s["x"] * (1 + np.tanh(0.7978845608 * (s["x"] + 0.044715 * s["x"] * s["x"] * s["x"])))),
        ("y",),
        8 * r * i,
    )
    yield Case(
        f"gelu backward, {r} x {i}",
        lambda g: arrays(x=normal(g, r, i), dy=normal(g, r, i), dx=zeros(r, i)),
        lambda s: slope(s["x"], s["dy"], s["dx"], kind="gelu_new"),
        lambda s: aten.gelu_backward.grad_input(s["dy_t"], s["x_t"], approximate="tanh", grad_input=s["dx_t"]),
        lambda s: np.copyto(s["dx"], s["dy"] * _slope(s["x"])),
        ("dx",),
        12 * r * i,
    )


def _additions(shape: Shape) -> Iterator[Case]:
    r, c, i = shape.tokens, shape.width, shape.inner
    add, accumulate, add_rows = (kernel(op, "cpu") for op in ("add", "accumulate", "add_rows"))
    yield Case(
        f"residual add, {r} x {c}",
        lambda g: arrays(a=normal(g, r, c), b=normal(g, r, c), y=zeros(r, c)),
        lambda s: add(s["a"], s["b"], s["y"]),
        lambda s: torch.add(s["a_t"], s["b_t"], out=s["y_t"]),
        lambda s: np.copyto(s["y"], s["a"] + s["b"]),
        ("y",),
        12 * r * c,
    )
    yield Case(
        f"add positions, {r} x {c}",
        lambda g: arrays(a=normal(g, 1, r, c), b=normal(g, r, c), y=zeros(1, r, c)),
        lambda s: add_rows(s["a"], s["b"], s["y"]),
        lambda s: torch.add(s["a_t"], s["b_t"], out=s["y_t"]),
        lambda s: np.copyto(s["y"], s["a"] + s["b"]),
        ("y",),
        12 * r * c,
    )
    yield Case(
        f"accumulate a gradient, {c} x {i}",
        lambda g: arrays(total=normal(g, c, i), part=normal(g, c, i)),
        lambda s: accumulate(s["total"], s["part"]),
        lambda s: s["total_t"].add_(s["part_t"]),
        lambda s: np.copyto(s["total"], s["total"] + s["part"]),
        ("total",),
        12 * c * i,
    )


def _copies(shape: Shape) -> Iterator[Case]:
    r, c, i = shape.tokens, shape.width, shape.inner
    dropout, copy = kernel("dropout", "cpu"), kernel("copy", "cpu")
    key = np.array([1, 2], np.uint64)
    yield Case(
        f"dropout, {r} x {c}",
        lambda g: arrays(x=normal(g, r, c), y=zeros(r, c)),
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
            lambda g, source=source, target=target: arrays(x=normal(g, r, i).astype(source), y=zeros(r, i).astype(target)),  # type: ignore[misc]
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


def _sums(shape: Shape) -> Iterator[Case]:
    r, i = shape.tokens, shape.inner
    columns, squares = kernel("column_sums", "cpu"), kernel("sum_squares", "cpu")
    yield Case(
        f"bias gradient: column sums, {r} x {i}",
        lambda g: arrays(dy=normal(g, r, i), db=zeros(i)),
        lambda s: columns(s["dy"], s["db"], accumulate=False),
        lambda s: torch.sum(s["dy_t"], 0, out=s["db_t"]),
        lambda s: np.copyto(s["db"], s["dy"].sum(0)),
        ("db",),
        4 * r * i,
    )
    yield Case(
        f"sum of squares, {r} x {i}",
        lambda g: arrays(x=normal(g, r, i), out=np.zeros(1)),
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
        lambda g: arrays(ids=g.integers(0, v, r).astype(np.int32), table=normal(g, v, c), x=zeros(r, c)),
        lambda s: take(s["ids"], s["table"], s["x"], v_start=0, vocab=2 * v, accumulate=False),
        lambda s: torch.index_select(s["table_t"], 0, s["ids_t"], out=s["x_t"]),
        lambda s: np.copyto(s["x"], s["table"][s["ids"]]),
        ("x",),
        8 * r * c,
    )
    yield Case(
        f"embedding backward, {r} into {v} x {c}",
        lambda g: arrays(ids=g.integers(0, v, r).astype(np.int32), dy=normal(g, r, c), dtable=zeros(v, c)),
        lambda s: add(s["ids"], s["dy"], s["dtable"], v_start=0, accumulate=False),
        torch_add,
        numpy_add,
        ("dtable",),
        4 * v * c + 12 * r * c,
    )


def _adamw(shape: Shape) -> Iterator[Case]:
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

    yield Case(
        f"AdamW, {c} x {i}",
        lambda g: arrays(p=normal(g, c, i), grad=normal(g, c, i), m=normal(g, c, i), v=np.abs(normal(g, c, i))),
        lambda s: adam(s["p"], s["grad"], s["m"], s["v"], hyper, row=0, decoupled=True, max_norm=0.0, clip=False, master=False),
        torch_adamw,
        numpy_adamw,
        ("p", "m", "v"),
        28 * c * i,
    )
