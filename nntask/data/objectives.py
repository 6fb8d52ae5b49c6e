"""Training objectives, and the arrays of a batch for each of them (table in `Objective`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from .batch import OF_BATCH, Batch

Kind = Literal["causal", "masked", "seq2seq", "classify"]
Form = Literal["stream", "chat", "pairs", "labels", "images"]
IGNORED: Final = -1
"""Target of a position that the loss ignores."""


@dataclass(frozen=True, slots=True)
class ImageShape:
    """Shape of a model's images: `size` x `size` pixels of `channels` values, in square patches of `patch` x `patch` pixels."""

    size: int
    patch: int
    channels: int

    @property
    def num_patches(self) -> int:
        """Number of patches of an image, N."""
        return (self.size // self.patch) ** 2

    @property
    def width(self) -> int:
        """Number of values of a patch, P."""
        return self.patch**2 * self.channels


@dataclass(frozen=True, slots=True)
class Objective:
    """A training objective, with the form of its data and the sizes of sequences.

    =========  =========  ==============================================================================================================
    objective  form       arrays of a batch
    =========  =========  ==============================================================================================================
    causal     stream     tokens (B, T), targets (B, T); if texts are kept apart also documents (B, T) and factor (1,)
    causal     chat       tokens, targets (-1 outside answers), documents (0 padding, else number of the conversation), factor
    masked     stream     tokens, targets (-1 at tokens not chosen), factor; if texts are kept apart also documents
    seq2seq    stream     tokens (B, S), documents (B, S) (1 text, 0 padding), decoder_tokens (B, T), targets (B, T), factor: corrupted spans
    seq2seq    pairs      the same: an input and its output
    classify   labels     tokens (B, T), documents (B, T) (1 text, 0 padding), token_types (B, T) of pairs (see below), targets (B, 1)
    classify   images     images (B, N, P) fp32: N patches of P values, targets (B, 1)
    =========  =========  ==============================================================================================================

    Images and factor are fp32, all other arrays int32. `factor` is 1 / (number of targets in the whole batch that are not -1), or 0 if there are no
    such targets: the loss is the mean over them. Without `factor` the loss is the mean over all positions. A model with one token type (RoBERTa) has
    no token_types.

    Args:
        kind: value of --objective.
        form: form of the data: a stream of texts, conversations, pairs of input and output, texts with labels, or images.
        length: number of tokens in a sequence, T; for seq2seq, number of tokens in the input, S.
        target_length: number of tokens in the output of seq2seq, T; None to derive it from S.
        separates: whether attention stays within one text, and rows share a sequence.
        has_pairs: whether a row of `labels` has two texts.
        num_token_types: number of the model's token types, which distinguish the two texts of a pair; not part of the cache key of rows.
        mask_probability: share of tokens that are predicted, for masked models and corrupted spans.
        num_labels: number of classes, for `labels` and `images`.
        labels: names of the classes; empty if they have none.
        pad: id that fills the end of a short row.
        start: id before the first token of an output.
        template: file of a chat template; "" for the tokenizer's own.
        image: shape of images; None for text.
        counts_positions: whether the model has a table of positions, so that each text in a sequence needs positions of its own; not part of the
            cache key of rows.
    """

    kind: Kind = "causal"
    form: Form = "stream"
    length: int = 1
    target_length: int | None = None
    separates: bool = False
    has_pairs: bool = False
    num_token_types: int = field(default=2, repr=False)
    mask_probability: float = 0.15
    num_labels: int = 0
    labels: tuple[str, ...] = ()
    pad: int = 0
    start: int = 0
    template: str = ""
    image: ImageShape | None = None
    counts_positions: bool = field(default=False, repr=False)

    @property
    def has_text_positions(self) -> bool:
        """Whether a batch has the positions of tokens in their texts."""
        return self.separates and self.counts_positions

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arrays of a batch."""
        if self.form == "images":
            return ("images", "targets")
        if self.kind == "seq2seq":
            return ("tokens", "documents", "decoder_tokens", "targets", "factor")
        if self.kind == "classify":
            return ("tokens", "documents", *(["token_types"] if self.has_pairs and self.num_token_types > 1 else []), "targets")
        documents = ["documents", *(["positions"] if self.has_text_positions else [])] if self.separates or self.form == "chat" else []
        return ("tokens", "targets", *documents, *(["factor"] if documents or self.kind == "masked" else []))

    @property
    def scored_names(self) -> tuple[str, ...]:
        """Names of the arrays for a sum of losses, which needs no array that describes the whole batch."""
        return tuple(name for name in self.names if name not in OF_BATCH)

    @property
    def is_plain(self) -> bool:
        """Whether a batch has only tokens and targets, so that each token is predicted from all tokens before it."""
        return self.names == ("tokens", "targets")


def factor_of(targets: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Return (1,) fp32, 1 / (number of targets that are not ignored); 0 if all are ignored."""
    count = int((targets != IGNORED).sum())
    return np.array([1 / count if count else 0.0], np.float32)


def random_batch(objective: Objective, size: int, vocab_size: int, seed: int | Sequence[int]) -> Batch:
    """Return a batch of random ids without ignored positions, for measurements.

    Args:
        objective: training objective, which determines the arrays.
        size: number of sequences, B.
        vocab_size: number of ids in the model's vocabulary.
        seed: seed of the random numbers.
    """
    draw = np.random.Generator(np.random.PCG64(seed))
    length = objective.length if objective.image is None else objective.image.num_patches
    target = 1 if objective.kind == "classify" else objective.target_length or length
    classes = objective.num_labels if objective.kind == "classify" else vocab_size
    arrays: dict[str, npt.NDArray[Any]] = {}
    if objective.is_plain:
        tokens = draw.integers(0, vocab_size, (size, length + 1), np.int32)
        return Batch.causal(tokens[:, :-1], tokens[:, 1:])
    for name in objective.names:
        if name == "factor":
            arrays[name] = np.array([1 / (size * target)], np.float32)
        elif name == "images":
            assert objective.image is not None  # an objective of images has a shape
            arrays[name] = draw.random((size, length, objective.image.width), np.float32)
        elif name in ("documents", "token_types"):
            arrays[name] = np.full((size, length), int(name == "documents"), np.int32)
        elif name == "positions":
            arrays[name] = np.tile(np.arange(length, dtype=np.int32), (size, 1))
        else:
            is_target = name in ("targets", "decoder_tokens")
            most = classes if name == "targets" else vocab_size
            arrays[name] = draw.integers(0, most, (size, target if is_target else length), np.int32)
    return Batch(arrays)
