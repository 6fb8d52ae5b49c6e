"""Attention on the tape: self-attention, causal or bidirectional, attention to a cached past, and attention to another sequence.

Letters: B sequences, T tokens, S keys, H heads of D features, G heads of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tiles import TileTensor
from tiles.kernels import Buckets
from tiles.ops import attention as attention_ops

from ..errors import UsageError
from .autograd import Gradients, Tensor, accumulator_of, add_to, on_tape, only
from .kv_cache import LayerPast


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """Learnt biases added to the scores by the distance between key and query (Raffel et al., T5, 2020); all layers of a stack may share one.

    Args:
        table: (num_buckets, H), a parameter, cut like the heads of queries.
        bidirectional: whether later keys have half of the buckets; otherwise all later keys share the first bucket.
        max_distance: distance from which on all keys share the last bucket.
    """

    table: Tensor
    bidirectional: bool
    max_distance: int

    def of_tiles(self) -> attention_ops.Bias:
        """Return the same bias for operations on tiles."""
        return attention_ops.Bias(self.table.data, Buckets(self.table.shape[0], self.bidirectional, self.max_distance))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    head_size: int,
    scale: float,
    dropout: attention_ops.Dropout | None = None,
    flash: bool = True,
    library: bool = False,
    past: LayerPast | None = None,
    causal: bool = True,
    window: int | None = None,
    documents: TileTensor | tuple[TileTensor, TileTensor] | None = None,
    bias: RelativeBias | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attention of q (B, T, H*D) to k, v (B, S, G*D) -> (B, T, H*D).

    If G < H, each head of k and v serves H / G neighbouring heads of q (Ainslie et al., GQA, 2023). A row that sees no key gives 0 and no gradient.

    Args:
        head_size: D.
        scale: factor of the scores, scale * q . k.
        dropout: dropout of the attention probabilities.
        flash: whether the (B, H, T, S) scores are recomputed in the backward pass instead of stored (Dao et al., FlashAttention, 2022).
        library: whether the attention library of the runtime's devices may compute it, in the cases that it supports; only with `flash`.
        past: keys and values of the earlier tokens; those of the new tokens are added. Allows no dropout and no documents, and leaves no tape.
        causal: whether each query sees only the keys up to its own position (needs S = T); otherwise it sees all keys.
        window: largest number of keys that a query of causal attention sees, its own the last. Tiles outside the window have no tasks.
        documents: (B, T) int32 document numbers, or a pair for queries (B, T) and keys (B, S). A query sees only keys of its own document; for
            several texts in a row, or for padding.
        bias: added to the scores.
        cap: soft cap of the scores, cap * tanh(scores / cap) (Gemma 2).
    """
    scoring = _scoring(window, documents, bias, cap)
    if past is not None:
        return _continued(q, k, v, past, head_size, scale, causal, scoring)
    edges, tiles = (q.edge, k.edge, v.edge), (q.data, k.data, v.data)
    how: attention_ops.AttentionOptions = {"head_size": head_size, "scale": scale, "causal": causal, "dropout": dropout, "scoring": scoring}
    forward = partial(attention_ops.attention, library=library) if flash else attention_ops.stored_attention
    o, saved = forward(*tiles, **how)  # saved: log of the softmax denominators (B, H, T), or the weights (B, H, T, S)
    table_edge = bias.table.edge if bias is not None else None

    def backward(gradients: Gradients) -> None:
        do = only(gradients)  # (B, T, H*D)
        through = partial(attention_ops.attention_backward, library=library) if flash else attention_ops.stored_attention_backward
        add_to(edges, through(*tiles, o, saved, do, **how, dtable=None if table_edge is None else accumulator_of(table_edge)))

    return on_tape("attention", [q, k, v, bias.table if bias is not None else None], [o], backward)[0]


def _scoring(
    window: int | None, documents: TileTensor | tuple[TileTensor, TileTensor] | None, bias: RelativeBias | None, cap: float | None
) -> attention_ops.Scoring:
    if window is None and documents is None and bias is None and cap is None:
        return attention_ops.UNCHANGED
    pair = (documents, documents) if isinstance(documents, TileTensor) else documents
    return attention_ops.Scoring(cap, None if bias is None else bias.of_tiles(), window, pair)


def _continued(
    q: Tensor, k: Tensor, v: Tensor, past: LayerPast, head_size: int, scale: float, causal: bool, scoring: attention_ops.Scoring
) -> Tensor:
    if not causal or scoring.documents is not None:
        raise UsageError(
            f"attention with a past is causal and of one document, got causal {causal}, {scoring}", "attend to an encoder without a past"
        )
    return Tensor(past.attend(q.data, k.data, v.data, head_size=head_size, scale=scale, scoring=scoring))
