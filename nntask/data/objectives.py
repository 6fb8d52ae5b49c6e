"""What a model learns from its data, and which arrays that takes.

=========  =========  ==============================================================================================================
objective  form       arrays of a batch
=========  =========  ==============================================================================================================
causal     stream     tokens (B, T), targets (B, T); where texts are kept apart also documents (B, T) and factor (1,)
causal     chat       tokens, targets (-1 outside answers), documents (0 padding, else number of the conversation), factor
masked     stream     tokens, targets (-1 where nothing was masked), factor; where texts are kept apart also documents
seq2seq    stream     tokens (B, S), documents (B, S) (1 text, 0 padding), decoder_tokens (B, T), targets (B, T), factor: corrupted spans
seq2seq    pairs      the same: an input and its output
classify   labels     tokens (B, T), documents (B, T) (1 text, 0 padding), token_types (B, T) of pairs (see below), targets (B, 1)
classify   images     images (B, N, P) fp32: N patches of P values, targets (B, 1)
=========  =========  ==============================================================================================================

Arrays are int32 but for images and factor, which are fp32. `factor` is 1 / number of targets of the whole batch that are not -1, 0 where there is
none: the loss is their mean. Without it the loss is the mean over all positions. A model with one kind of tokens (RoBERTa) takes no token_types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from .batch import OF_BATCH, Batch

Kind = Literal["causal", "masked", "seq2seq", "classify"]
Form = Literal["stream", "chat", "pairs", "labels", "images"]
KINDS: Final[tuple[Kind, ...]] = ("causal", "masked", "seq2seq", "classify")
IGNORED: Final = -1
"""The target of a position that the loss leaves out."""


@dataclass(frozen=True, slots=True)
class ImageShape:
    """Images as a model takes them: `size` x `size` pixels of `channels` values, in square patches of `patch` x `patch` pixels."""

    size: int
    patch: int
    channels: int

    @property
    def num_patches(self) -> int:
        """N, patches of an image."""
        return (self.size // self.patch) ** 2

    @property
    def width(self) -> int:
        """P, values of a patch."""
        return self.patch**2 * self.channels


@dataclass(frozen=True, slots=True)
class Objective:
    """What is learnt, and the sizes of what it is learnt from.

    Args:
        kind: the value of --objective.
        form: what the data are made of: a stream of texts, conversations, pairs of input and output, texts with labels, images.
        length: T, tokens of a sequence; of seq2seq S, those of the input.
        target_length: T of seq2seq, tokens of the output; None for what follows from S.
        separates: whether attention is kept within one text, and rows share a sequence.
        has_pairs: whether a row of `labels` has two texts.
        num_token_types: kinds of tokens that the model knows, which tell two texts apart. The rows that are kept do not follow from it.
        mask_probability: share of tokens that are predicted, of masked and of corrupted spans.
        num_labels: classes of `labels` and `images`.
        labels: their names; empty where they have none.
        pad: id behind the end of a short row.
        start: id before the first token of an output.
        template: file of a chat template; "" for the tokenizer's own.
        image: shape of images; None for text.
        counts_positions: whether the model has a table of positions, so that texts in one sequence need positions of their own. The rows that are
            kept do not follow from it.
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
    def places_texts(self) -> bool:
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
        documents = ["documents", *(["positions"] if self.places_texts else [])] if self.separates or self.form == "chat" else []
        return ("tokens", "targets", *documents, *(["factor"] if documents or self.kind == "masked" else []))

    @property
    def scored_names(self) -> tuple[str, ...]:
        """Names of the arrays for a sum of losses, which needs nothing that is said of the whole batch."""
        return tuple(name for name in self.names if name not in OF_BATCH)

    @property
    def is_plain(self) -> bool:
        """Whether each token is predicted from those before it, as in a batch of tokens and targets alone."""
        return self.names == ("tokens", "targets")


def factor_of(targets: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """(1,) 1 / number of targets that count, 0 where there is none."""
    count = int((targets != IGNORED).sum())
    return np.array([1 / count if count else 0.0], np.float32)


def random_batch(objective: Objective, size: int, vocab_size: int, seed: int | Sequence[int]) -> Batch:
    """A batch of random ids that count in full, for measurements."""
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
            assert objective.image is not None  # they have a shape
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
