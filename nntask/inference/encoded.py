"""Prompts of encoder-decoder models: the encoder runs once over them, and every token of the decoder attends to its output.

Letters: B prompts, S tokens of the longest prompt, T tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tiles import TileTensor

from ..models.language import LanguageModel
from ..nn.autograd import no_grad
from ..nn.kv_cache import EncoderPast, kept, source_documents


def filled(texts: Sequence[Sequence[int]], shape: Sequence[int], padding: int = 0) -> npt.NDArray[np.int32]:
    """Return ids of texts as rows of an array, with padding at their ends."""
    ids = np.full(shape, padding, np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = text
    return ids


def padded(model: LanguageModel, sources: Sequence[Sequence[int]], length: int | None = None) -> dict[str, TileTensor]:
    """Return tokens and documents (B, S) of prompts of unequal lengths; shorter ones are padded at the end.

    Args:
        sources: ids of each prompt.
        length: T, to add `decoder_tokens` (B, T), which are not written.
    """
    names = ("tokens", "documents") if length is None else ("tokens", "documents", "decoder_tokens")
    found = model.inputs(len(sources), max(map(len, sources)), names, length)
    found["tokens"].write(filled(sources, found["tokens"].shape, getattr(model.config, "pad_token_id", None) or 0))
    found["documents"].write(_is_text(sources))
    return found


def attended(model: LanguageModel, sources: Sequence[Sequence[int]], num_beams: int = 1) -> list[EncoderPast]:
    """Run the encoder once and return the keys and values of the prompts for each layer of the decoder, `num_beams` rows a prompt."""
    given = padded(model, sources)
    model.eval()
    with no_grad():
        pairs = [(keys.data, values.data) for keys, values in model.encode(**given)]
    return pasts(pairs, sources, num_beams)


def pasts(pairs: list[tuple[TileTensor, TileTensor]], sources: Sequence[Sequence[int]], num_beams: int) -> list[EncoderPast]:
    """Return the pasts of keys and values (B, S, G*D) of each layer. `pairs` is emptied, which frees its memory."""
    found: list[EncoderPast] = []
    while pairs:
        pair = pairs.pop(0)
        keys, values = (kept(each, num_beams) for each in pair)
        documents = found[0].documents if found else source_documents(keys, _is_text(sources))
        found.append(EncoderPast(keys, values, documents))
        del pair
    return found


def _is_text(sources: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Return (B, S): 1 for a token of a prompt, 0 for padding."""
    lengths = np.array([len(source) for source in sources])[:, None]
    return (np.arange(lengths.max()) < lengths).astype(np.int32)
