"""Training sequences of a data source, chosen by the objective."""

from __future__ import annotations

from ..errors import DataError
from .images import ImageRows, ImageSource
from .masking import MaskedWindows, masking_of
from .objectives import Objective
from .packing import PlacedTexts, SeparateMaskedWindows, SeparateWindows
from .row_file import RowFile
from .rows import Rows
from .sampler import Examples, Shuffled, Windows
from .spans import CorruptedSpans
from .token_file import TokenFile
from .tokenizer import Tokenizer

Source = TokenFile | RowFile | ImageSource


def examples_of(source: Source, objective: Objective, tokenizer: Tokenizer | None, vocab_size: int, seed: int) -> Examples:
    """Return the sequences of a source; they include each token's position in its text if the model has a table of positions.

    Args:
        source: training or validation data.
        objective: training objective of the model.
        tokenizer: tokenizer that produced the ids; None if it is unknown.
        vocab_size: number of ids in the model's vocabulary.
        seed: seed of the random choices.

    Raises:
        DataError: the tokenizer lacks a token that the objective needs.
    """
    sequences = _sequences_of(source, objective, tokenizer, vocab_size, seed)
    return PlacedTexts(sequences) if objective.has_text_positions else sequences


def _sequences_of(source: Source, objective: Objective, tokenizer: Tokenizer | None, vocab_size: int, seed: int) -> Examples:
    if isinstance(source, ImageSource):
        return Shuffled(ImageRows(source, objective))  # so that the first images are of all classes
    if isinstance(source, RowFile):
        return Rows(source, objective)
    if objective.kind == "seq2seq":
        return CorruptedSpans(source, objective, tokenizer, vocab_size, seed)
    masking = masking_of(tokenizer, vocab_size, objective.mask_probability, seed) if objective.kind == "masked" else None
    if not objective.separates:
        return Windows(source, objective.length) if masking is None else MaskedWindows(source, objective.length, masking)
    if tokenizer is None:
        raise DataError(
            f"needs the end-of-text id, and the tokenizer of {source.name} is not known",
            "name it with --tokenizer-path DIR",
            flag="--document-boundaries",
        )
    begin, end = tokenizer.begin_of_text, tokenizer.end_of_text
    if masking is None:
        return SeparateWindows(source, objective.length, begin, end)
    return SeparateMaskedWindows(source, objective.length, masking, begin, end)
