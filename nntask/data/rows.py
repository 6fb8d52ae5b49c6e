"""Rows as training sequences: pairs of input and output, texts with labels, conversations. Long rows are cut when encoded, short ones padded here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .chat_process import ChatProcess
from .chat_source import ChatSource
from .encoding import RowEncoder
from .json_lines import JsonLines, Record
from .known_ids import check_known
from .objectives import IGNORED, Form, Objective
from .row_counts import RowCounts
from .row_file import Row, RowFile
from .spans import rows_of_pairs
from .tokenizer import Tokenizer

NUM_FIELDS: Final[dict[Form, int]] = {"pairs": 2, "labels": 3, "chat": 2}
"""Form -> number of fields: input and output; ids, their types, and the label; ids, and whether each belongs to an answer."""


class Rows:
    """Sequences of a row file for an objective."""

    def __init__(self, file: RowFile, objective: Objective) -> None:
        self.file, self.name, self.length = file, file.name, objective.length
        self.names: Sequence[str] = objective.names
        self._objective = objective

    @property
    def num_sequences(self) -> int:
        """Number of sequences."""
        return self.file.num_sequences

    def too_few(self, batch: int) -> str:
        """Return the error message for fewer sequences than `batch`."""
        found, packs = self.num_sequences, " packed into sequences" if self._objective.separates else ""
        advice = f"use more rows, or --batch {found}" if found else "use more rows"
        if not found and self._objective.form == "chat":
            advice = f"use conversations with an answer within --seq-len {self.length}, and a chat template that writes it"
        return f"{self.name} has {found} row{'' if found == 1 else 's'}{packs}, and --batch is {batch}; {advice}"

    def arrays(self, numbers: npt.NDArray[np.int64], epoch: int) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of the objective, except `factor`."""
        sequences = [self.file.sequence(int(number)) for number in numbers]
        if self._objective.form == "pairs":
            return rows_of_pairs([(each[0][0], each[0][1]) for each in sequences], self._objective)
        if self._objective.form == "labels":
            return self._labelled([each[0] for each in sequences])
        return self._answers(sequences)

    def _labelled(self, rows: Sequence[Row]) -> dict[str, npt.NDArray[Any]]:
        shape = (len(rows), self.length)
        tokens = np.full(shape, self._objective.pad, np.int32)
        documents, types, targets = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.empty((len(rows), 1), np.int32)
        for at, (ids, kinds, label) in enumerate(rows):
            tokens[at, : len(ids)], types[at, : len(ids)], documents[at, : len(ids)] = ids, kinds, 1
            targets[at] = label
        pairs = {"token_types": types} if "token_types" in self.names else {}
        return {"tokens": tokens, "documents": documents, **pairs, "targets": targets}

    def _answers(self, sequences: Sequence[Sequence[Row]]) -> dict[str, npt.NDArray[Any]]:
        shape = (len(sequences), self.length)
        tokens, targets = np.full(shape, self._objective.pad, np.int32), np.full(shape, IGNORED, np.int32)
        documents = np.zeros(shape, np.int32)
        for at, rows in enumerate(sequences):
            first = 0
            for number, (ids, counts) in enumerate(rows, 1):
                cut = slice(first, first + len(ids) - 1)
                tokens[at, cut], targets[at, cut] = ids[:-1], np.where(counts[1:] > 0, ids[1:], np.int32(IGNORED))
                documents[at, cut] = number
                first = cut.stop
        return {"tokens": tokens, "targets": targets, "documents": documents}


def encoded_rows(lines: JsonLines, objective: Objective, tokenizer: Tokenizer, vocab_size: int, counts: RowCounts) -> Iterator[Row]:
    """Yield the encoded rows of lines, cut to the objective's lengths.

    Args:
        lines: lines to encode.
        objective: training objective.
        tokenizer: tokenizer that encodes the texts.
        vocab_size: number of ids in the model's vocabulary.
        counts: counters of rows that are cut, changed or left out.

    Raises:
        DataError: a line lacks a value that the objective needs, or has a token outside the vocabulary; or the tokenizer has no chat template.
    """
    encoder = RowEncoder(tokenizer)
    if objective.form == "chat":
        with closing(ChatProcess(ChatSource.of(tokenizer, objective.template))) as template:
            for line, row in _conversations(lines, objective, template, encoder, counts):
                check_known(row[0], tokenizer, vocab_size, line.where)
                yield row
        return
    for line in lines:
        counts.num_rows += 1
        if objective.form == "pairs":
            counts.check("pairs", [line.values], line.where)
            assert objective.target_length is not None  # `config.objective` has set it
            source, _, is_cut = encoder.row(line.text("input"), None, objective.length)
            target, _, target_is_cut = encoder.row(line.text("target"), None, objective.target_length)
            check_known(np.concatenate((source, target)), tokenizer, vocab_size, line.where)
            counts.add("inputs_cut", is_cut)
            counts.add("outputs_cut", target_is_cut)
            yield source, target
        else:
            counts.check("labels", [line.values], line.where)
            second = line.text("pair") if "pair" in line.values else None
            if second is not None and not objective.has_pairs:
                raise DataError(f'{line.where} has a "pair" and the first line has none', "give all lines one, or none")
            ids, types, is_cut = encoder.row(line.text("text"), second, objective.length)
            check_known(ids, tokenizer, vocab_size, line.where)
            counts.add("rows_cut", is_cut)
            yield ids, types, np.array([label_of(line, objective)], np.int32)


def _conversations(
    lines: JsonLines, objective: Objective, template: ChatProcess, encoder: RowEncoder, counts: RowCounts
) -> Iterator[tuple[Record, Row]]:
    """Yield the rows of conversations, each with its line; conversations without anything to learn are left out."""
    limit = objective.length + 1  # the last id is a target only
    for line, text, answers in template.rows(lines, counts):
        counts.num_rows += 1
        ids, is_answer = encoder.answers(text, answers)
        if is_answer[1:limit].any():
            counts.add("rows_cut", len(ids) > limit)
            yield line, (ids[:limit], is_answer[:limit].astype(np.int32))
        else:
            counts.add("rows_left_out" if is_answer.any() else "rows_without_answers")


def label_of(line: Record, objective: Objective) -> int:
    """Return the class number of a line's label.

    Raises:
        DataError: the label is neither a class number nor the name of a class.
    """
    value = line.values.get("label")
    if isinstance(value, str) and value in objective.labels:
        return objective.labels.index(value)
    if type(value) is int and 0 <= value < objective.num_labels:
        return value
    names = f" or one of {', '.join(objective.labels)}" if objective.labels else ""
    raise DataError(
        f'{line.where} must have a "label", a whole number from 0 to {objective.num_labels - 1}{names}, got {value!r}',
        "fix the line, or set num_labels in the config",
    )
