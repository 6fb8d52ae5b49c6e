"""PyTorch's twins of our kernels: a second opinion, by other code, on what each computes.

A twin takes the arguments of a kernel as tensors of the device that it is on, and returns what PyTorch computes for some of them, by their number.
Gradients come from autograd. What has no twin stands in `WITHOUT`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from support.cuda_cases import arguments
from support.kernel_cases import CASES
from torch import Tensor

from tiles.kernels.reference.attention import Pattern

Twin = Callable[..., dict[int, Tensor] | None]
"""(tensors, constants) -> argument -> value; None of a case that it does not know."""


def _activated(x: Tensor, kind: str) -> Tensor:
    if kind == "gelu_new":
        return F.gelu(x, approximate="tanh")
    return {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh}[kind](x)


def _gradients(result: Tensor, by: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(result, inputs, by)


def _wants(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def _onto(before: Tensor, value: Tensor, accumulate: bool) -> Tensor:
    return before + value if accumulate else value


def _transposed(a: Tensor, flag: bool) -> Tensor:
    return a.transpose(-1, -2) if flag else a


def _accumulate(total: Tensor, addend: Tensor) -> dict[int, Tensor]:
    return {0: total + addend}


def _add(a: Tensor, b: Tensor, out: Tensor) -> dict[int, Tensor]:
    return {2: torch.add(a, b)}


def _scale(x: Tensor, out: Tensor, *, alpha: float) -> dict[int, Tensor]:
    return {1: torch.mul(x, alpha)}


def _copy(x: Tensor, out: Tensor) -> dict[int, Tensor]:
    return {1: x.to(out.dtype)}


def _fill(out: Tensor, *, value: float) -> dict[int, Tensor]:
    return {0: torch.full_like(out, value)}


def _add_into(addend: Tensor, total: Tensor, *, accumulate: bool) -> dict[int, Tensor]:
    return {1: _onto(total, addend, accumulate)}


def _add_rows(x: Tensor, p: Tensor, out: Tensor) -> dict[int, Tensor]:
    return {2: x + p[: x.shape[1]]}


def _activation(x: Tensor, y: Tensor, *, kind: str) -> dict[int, Tensor]:
    return {1: _activated(x, kind)}


def _activation_backward(x: Tensor, dy: Tensor, dx: Tensor, *, kind: str) -> dict[int, Tensor]:
    (x,) = _wants(x)
    return {2: _gradients(_activated(x, kind), dy, x)[0]}


def _gate(gates: Tensor, up: Tensor, y: Tensor, *, kind: str = "silu") -> dict[int, Tensor]:
    return {2: _activated(gates, kind) * up}


def _gate_backward(gates: Tensor, up: Tensor, dy: Tensor, dgates: Tensor, dup: Tensor, *, kind: str = "silu") -> dict[int, Tensor]:
    gates, up = _wants(gates, up)
    found = _gradients(_activated(gates, kind) * up, dy, gates, up)
    return {3: found[0], 4: found[1]}


def _clamp(x: Tensor, y: Tensor, *, most: float) -> dict[int, Tensor]:
    return {1: x.clamp(-most, most)}


def _cap(x: Tensor, y: Tensor, *, most: float) -> dict[int, Tensor]:
    return {1: most * torch.tanh(x / most)}


def _matmul(a: Tensor, b: Tensor, out: Tensor, *, trans_a: bool, trans_b: bool, alpha: float, accumulate: bool) -> dict[int, Tensor]:
    left, right = _transposed(a.flatten(0, -2), trans_a), _transposed(b.flatten(0, -2), trans_b)
    return {2: _onto(out, (alpha * left @ right).view(out.shape), accumulate)}


def _batched_matmul(a: Tensor, b: Tensor, out: Tensor, *, trans_a: bool, trans_b: bool, alpha: float, accumulate: bool) -> dict[int, Tensor]:
    return {2: _onto(out, alpha * torch.matmul(_transposed(a, trans_a), _transposed(b, trans_b)), accumulate)}


def _linear_bias(x: Tensor, w: Tensor, bias: Tensor, y: Tensor, *, trans_b: bool) -> dict[int, Tensor]:
    return {3: F.linear(x, w if trans_b else w.T, bias)}


def _column_sums(dy: Tensor, db: Tensor, *, accumulate: bool) -> dict[int, Tensor]:
    return {1: _onto(db, dy.flatten(0, -2).sum(0), accumulate)}


def _row_sums(x: Tensor, sums: Tensor, *, accumulate: bool) -> dict[int, Tensor]:
    return {1: _onto(sums, x.sum(-1), accumulate)}


def _sum_squares(x: Tensor, out: Tensor) -> dict[int, Tensor]:
    return {1: x.double().square().sum().view(1)}


def _layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, y: Tensor, mean: Tensor, rstd: Tensor, *, eps: float) -> dict[int, Tensor]:
    found, center, scale = torch.native_layer_norm(x, gamma.shape, gamma, beta, eps)
    return {3: found, 4: center.view(mean.shape), 5: scale.view(rstd.shape)}


def _layer_norm_backward(x: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, dy: Tensor, *rest: Tensor, **terms: bool) -> dict[int, Tensor]:
    *extra, _, dgamma, dbeta = rest
    at, shape = 5 + len(extra), (*mean.shape, 1)
    found = torch.ops.aten.native_layer_norm_backward(dy, x, list(gamma.shape), mean.view(shape), rstd.view(shape), gamma, gamma, [True, True, True])
    ours = found[0] + extra[0] if terms["residual"] else found[0]
    return {at: ours, at + 1: _onto(dgamma, found[1], terms["accumulate"]), at + 2: _onto(dbeta, found[2], terms["accumulate"])}


def _rms_norm(x: Tensor, gamma: Tensor, y: Tensor, rstd: Tensor, *scratch: Tensor, eps: float, offset: float = 0.0) -> dict[int, Tensor]:
    return {2: F.rms_norm(x, gamma.shape, gamma + offset, eps)}


def _embedding(tokens: Tensor, table: Tensor, x: Tensor, *, v_start: int, vocab: int, accumulate: bool) -> dict[int, Tensor] | None:
    here = (tokens >= v_start) & (tokens < v_start + len(table))
    found = F.embedding((tokens - v_start).clamp(0, len(table) - 1), table)
    return {2: torch.where(here[..., None], found, x if accumulate else torch.zeros_like(x))}


def _embedding_backward(tokens: Tensor, dy: Tensor, dtable: Tensor, *, v_start: int, accumulate: bool) -> dict[int, Tensor]:
    rows, grads = tokens.flatten().long() - v_start, dy.flatten(0, -2)
    here = (rows >= 0) & (rows < len(dtable))
    return {2: (dtable if accumulate else torch.zeros_like(dtable)).index_add(0, rows[here], grads[here])}


def _swap_tokens(x: Tensor, y: Tensor) -> dict[int, Tensor]:
    return {1: x.transpose(1, 2).contiguous()}


def _first_token(x: Tensor, y: Tensor) -> dict[int, Tensor]:
    return {1: x[:, :1]}


def _attention_delta(o: Tensor, do: Tensor, delta: Tensor, *, head_size: int) -> dict[int, Tensor]:
    heads = (o * do).unflatten(-1, (-1, head_size))
    return {2: heads.sum(-1).transpose(1, 2)}


def _heads(x: Tensor, size: int, share: int = 1) -> Tensor:
    return x.unflatten(-1, (-1, size)).transpose(1, 2).repeat_interleave(share, 1)  # (b, t, h D) -> (b, h, t, D)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, peak: Tensor, total: Tensor, *rest: Tensor, at: Any, **terms: bool
) -> dict[int, Tensor] | None:
    if not (terms["first"] and terms["last"]) or at.p or at.pattern != Pattern():
        return None
    share = q.shape[2] // k.shape[2]
    rows, columns = at.q_start + torch.arange(q.shape[1], device=q.device), at.k_start + torch.arange(k.shape[1], device=q.device)
    mask = rows[:, None] >= columns if at.causal else torch.ones(len(rows), len(columns), dtype=torch.bool, device=q.device)
    found = F.scaled_dot_product_attention(*(_heads(x, at.head_size, n) for x, n in ((q, 1), (k, share), (v, share))), attn_mask=mask, scale=at.scale)
    return {3: found.transpose(1, 2).flatten(2)}


def _adam(param: Tensor, grad: Tensor, m: Tensor, v: Tensor, hyper: Tensor, *rest: Tensor, **terms: Any) -> dict[int, Tensor] | None:
    if terms["clip"] or terms["master"]:
        return None
    lr, _, _, beta1, beta2, eps, decay, _ = hyper[terms["row"]].tolist()
    (weights,) = _wants(param)
    weights.grad = grad.clone()
    kind = torch.optim.AdamW if terms["decoupled"] else torch.optim.Adam
    optimizer = kind([weights], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    optimizer.state[weights] = {"step": torch.tensor(float(_STEP - 1)), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
    optimizer.step()
    return {0: weights.detach(), 2: optimizer.state[weights]["exp_avg"], 3: optimizer.state[weights]["exp_avg_sq"]}


_STEP: Final = 7
_PREPARED: Final[dict[str, Callable[[list[np.ndarray]], None]]] = {
    "adam": lambda args: args[4].__setitem__((1, slice(3)), (0.1, 1 - 0.9**_STEP, 1 - 0.99**_STEP)),
}
"""What a case lacks to be one of PyTorch's: of Adam, corrections of one step."""

TWINS: Final[dict[str, Twin]] = {
    twin.__name__.removeprefix("_"): twin
    for twin in (
        _accumulate, _activation, _activation_backward, _adam, _add, _add_into, _add_rows, _attention, _attention_delta, _batched_matmul,
        _cap, _clamp, _column_sums, _copy, _embedding, _embedding_backward, _fill, _first_token, _gate, _gate_backward, _layer_norm,
        _layer_norm_backward, _linear_bias, _matmul, _rms_norm, _row_sums, _scale,
        _sum_squares, _swap_tokens,
    )
} | {"silu_gate": _gate, "silu_gate_backward": _gate_backward}  # fmt: skip

_PARTS = (
    "add_rows_backward attention_apply attention_backward attention_lse attention_scores head_backward head_finish head_forward "
    "mean_tokens mean_tokens_backward norm_apply norm_backward_apply norm_backward_sums norm_finish row_squares "
    "sum_scalars first_token_backward select_rows gather_rows balance balance_backward balance_finish expert_forward expert_backward "
    "zero_sums gram muon_momentum muon_normalise muon_polynomial muon_update"
)
_REASONS = {
    "random numbers by element are our own": "dropout keyed_uniform random_normal random_uniform",
    "a part of an operation that is cut into tiles: PyTorch has the whole": _PARTS,
    "PyTorch has no such cache": "append_to_cache append_to_pages cached_attention combine_pages paged_attention",
    "PyTorch has no such blocks": "adam8bit decode_blocks quantised_embedding quantised_linear",
    "PyTorch has no such operation": "rotary rotary_angles rotary_angles_at route route_backward row_gate row_gate_backward",
    "two of the others in one, or one of them in another form": "cap_backward clamp_backward head_norm head_norm_backward linear_activation "
    "linear_activation_backward matmuls residual_layer_norm residual_rms_norm rms_norm_backward sgd whole_attention whole_attention_backward",
}
WITHOUT: Final[dict[str, str]] = {op: reason for reason, ops in _REASONS.items() for op in ops.split()}
"""Operations without a twin, and why."""


def compare_with_torch(op: str, run: Callable[..., None], device: str, rtol: float = 2e-4, atol: float = 5e-5) -> float:
    """Compare every case of a kernel that its twin knows.

    Args:
        run: `KernelBench.run`, or another one that leaves a kernel's results in its arrays.
        device: where PyTorch computes.

    Returns:
        The largest difference.

    Raises:
        AssertionError: they differ by more, or the twin knows no case.
    """
    most, num_known = 0.0, 0
    for number in range(len(CASES[op])):
        args, constants = arguments(op, number, short=False)
        _PREPARED.get(op, lambda args: None)(args)
        want = TWINS[op](*(torch.from_numpy(arg.copy()).to(device) for arg in args), **constants)
        if want is None:
            continue
        num_known += 1
        run(op, args, **constants)
        for position, value in want.items():
            theirs = value.detach().cpu().double().numpy().reshape(args[position].shape)
            np.testing.assert_allclose(
                args[position].astype(np.float64), theirs, rtol=rtol, atol=atol, err_msg=f"{op}, case {number}, argument {position}"
            )
            most = max(most, float(np.abs(args[position] - theirs).max(initial=0.0)))
    assert num_known, f"the twin of {op} knows none of its cases"
    return most
