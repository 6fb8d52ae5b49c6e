"""Prompts that an encoder reads: it runs over them once, and every token of the decoder attends to what it says of them.

Letters: B prompts, S tokens of the longest, T tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiles import TileTensor

from ..models.language import LanguageModel
from ..nn.autograd import no_grad
from ..nn.encoder_past import EncoderPast, kept, source_documents


def padded(model: LanguageModel, sources: Sequence[Sequence[int]], length: int | None = None) -> dict[str, TileTensor]:
    """Tokens and documents (B, S) of sources of unequal lengths, with padding behind the shorter ones.

    Args:
        length: T; with it also decoder_tokens (B, T), which are not written.
    """
    names = ("tokens", "documents") if length is None else ("tokens", "documents", "decoder_tokens")
    found = model.inputs(len(sources), max(map(len, sources)), names, length)
    tokens = np.full(found["tokens"].shape, getattr(model.config, "pad_token_id", None) or 0, np.int32)
    for row, source in enumerate(sources):
        tokens[row, : len(source)] = source
    found["tokens"].write(tokens)
    found["documents"].write(_is_text(sources))
    return found


def attended(model: LanguageModel, sources: Sequence[Sequence[int]], num_beams: int = 1) -> list[EncoderPast]:
    """What each layer of the decoder sees of the sources, `num_beams` rows for each; an encoder runs once."""
    given = padded(model, sources)
    model.eval()
    with no_grad():
        pairs = [(keys.data, values.data) for keys, values in model.encode(**given)]
    return pasts(pairs, sources, num_beams)


def pasts(pairs: list[tuple[TileTensor, TileTensor]], sources: Sequence[Sequence[int]], num_beams: int) -> list[EncoderPast]:
    """The same, of keys and values (B, S, G*D) of each layer; the list is emptied, and with it their memory."""
    found: list[EncoderPast] = []
    while pairs:
        pair = pairs.pop(0)
        keys, values = (kept(each, num_beams) for each in pair)
        documents = found[0].documents if found else source_documents(keys, _is_text(sources))
        found.append(EncoderPast(keys, values, documents))
        del pair
    return found


def _is_text(sources: Sequence[Sequence[int]]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """(B, S), 1 where there is text."""
    lengths = np.array([len(source) for source in sources])[:, None]
    return (np.arange(lengths.max()) < lengths).astype(np.int32)
