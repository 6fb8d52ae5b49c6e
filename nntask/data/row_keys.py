"""Known keys of rows and messages: each is used, ignored for a reason, or refused because ignoring it would change the meaning of the row.

A refused key is ignored if its value is empty (null, false, or an empty string, list or object) or the usual one. Unknown keys are ignored and
counted by `RowCounts`, so that a run reports each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..errors import DataError

RowKind = Literal["text", "pairs", "labels", "chat", "message"]
Use = Literal["used", "written", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class KeyRule:
    """Rule for a key.

    Args:
        use: "used", "ignored" or "refused"; or "written", for a key that the chat template must write, else the row is refused.
        reason: purpose of a used key, reason why a key is ignored, or remedy for a refused key.
        usual: value of a refused key that is accepted because it requests the default behaviour.
    """

    use: Use
    reason: str
    usual: object = False

    def is_refused(self, value: Any) -> bool:
        """Return whether a value of the key is refused."""
        is_usual = value is self.usual if isinstance(self.usual, bool) else type(value) is not bool and value == self.usual
        return self.use == "refused" and not is_usual and (value is False or not is_nothing(value))


def _all(use: Use, reason: str, *keys: str, usual: object = False) -> dict[str, KeyRule]:
    return dict.fromkeys(keys, KeyRule(use, reason, usual))


_PROVENANCE: Final = {
    **_all("ignored", "names the row", "id", "_id", "idx", "index", "row_id", "uuid", "hash", "key"),
    **_all("ignored", "names the origin of the row", "conversation_id", "conv_id", "session_id", "question_id", "prompt_id", "source", "dataset"),
    **_all("ignored", "names the origin of the row", "origin", "url", "license", "author", "model", "generator", "subset", "split", "config"),
    **_all(
        "ignored", "describes the row", "metadata", "meta", "tags", "category", "topic", "full_topic", "task", "domain", "language", "lang", "type"
    ),
    **_all("ignored", "describes the row", "created", "created_at", "date", "timestamp", "version"),
    **_all("ignored", "measures the row", "score", "quality", "difficulty", "rating", "num_turns", "num_tokens", "token_count", "length"),
}
_MEDIA: Final = _all("refused", "a text model reads no media", "image", "images", "video", "videos", "audio", "audios", "files")
_WEIGHTS: Final = _all(
    "refused", "all rows count alike; write a row more than once", "weight", "sample_weight", "loss_weight", "loss_scale", "importance", usual=1
)
_PREFERENCES: Final = _all(
    "refused",
    "preferences are not learnt; keep the better answer as the conversation",
    *("chosen", "rejected", "rejected_response", "kto_tag", "margin"),
)

_IDS: Final = {
    **_all("refused", "ids of another program; write them as a train.bin", "input_ids", "token_ids"),
    **_all(
        "refused",
        'which tokens are learnt follows from --objective and, of messages, from their "weight"; use these',
        *("loss_mask", "completion_mask", "assistant_masks"),
    ),
    **_all(
        "ignored",
        "belongs to ids of another program",
        *("attention_mask", "token_type_ids", "special_tokens_mask", "offset_mapping", "position_ids", "overflow_to_sample_mapping"),
    ),
}
_TABLE_INDEX: Final = _all("ignored", "names the row", "__index_level_0__", "Unnamed: 0")
"""Index columns that pandas writes to tables, and to CSV files."""
_CORPORA: Final = {
    **_all("ignored", "names the origin of the text", "title", "doc_id", "docid", "digest", "blob_id", "hexsha", "warc_record_id", "warcinfo"),
    **_all("ignored", "names the origin of the text", "dump", "segment", "cc_segment", "bucket", "file_path", "filename", "path", "repo_name", "ext"),
    **_all("ignored", "names the origin of the text", "domain_name", "source_domain", "pile_set_name", "red_pajama_subset", "short_book_title"),
    **_all("ignored", "describes the text", "description", "attributes", "format", "audience", "seed_data", "content_type", "keywords", "top_langs"),
    **_all("ignored", "describes the text", "language_script", "language_score", "language_id_whole_page_fasttext", "warc_headers", "meta_data"),
    **_all("ignored", "says when the text was written or added", "added", "date_download", "publication_date", "last_modified", "year"),
    **_all("ignored", "measures the text", "int_score", "edu_int_score", "quality_signals", "perplexity", "size", "nlines", "line_ids", "count"),
    **_all("ignored", "measures the text", "text_token_length", "char_count", "word_count", "previous_word_count", "original_length"),
    **_all("ignored", "measures the text", "original_nlines", "minhash_cluster_size", "bff_contained_ngram_count_before_dedupe", "embedding"),
    **_all("ignored", "a class, which --objective classify learns", "label"),
}
"""Keys of public corpora such as C4, the Pile, OpenWebText, FineWeb, Dolma, RedPajama, SlimPajama, DCLM, OSCAR, Cosmopedia and PG-19."""
_SECOND_TEXTS: Final = ("text_pair", "text2", "text_b", "sentence2")

ROW_KEYS: Final[Mapping[RowKind, Mapping[str, KeyRule]]] = {
    "text": {
        **_PROVENANCE,
        **_TABLE_INDEX,
        **_CORPORA,
        **_MEDIA,
        **_WEIGHTS,
        **_PREFERENCES,
        **_IDS,
        **_all("used", "the text", "text"),
        **_all("refused", 'a second text; join it with the first under "text"', "pair", *_SECOND_TEXTS),
        **_all("refused", "a stream of texts is learnt whole, token by token; use --objective classify for classes", "labels"),
    },
    "pairs": {
        **_PROVENANCE,
        **_TABLE_INDEX,
        **_MEDIA,
        **_WEIGHTS,
        **_PREFERENCES,
        **_IDS,
        **_all("refused", 'a pair is learnt by its "target"; write the text there', "labels"),
        **_all("used", "the text that the model reads", "input"),
        **_all("used", "the text that the model learns to write", "target"),
        **_all("refused", 'text that belongs to the input; put it into "input"', "instruction", "system", "prefix", "context", "history"),
    },
    "labels": {
        **_PROVENANCE,
        **_TABLE_INDEX,
        **_MEDIA,
        **_WEIGHTS,
        **_IDS,
        **_all("used", "the text", "text"),
        **_all("used", "the second text", "pair"),
        **_all("used", "the class", "label"),
        **_all("refused", 'name the second text "pair"', *_SECOND_TEXTS),
        **_all("refused", 'a row has one class; name it "label"', "labels"),
    },
    "chat": {
        **_PROVENANCE,
        **_TABLE_INDEX,
        **_MEDIA,
        **_WEIGHTS,
        **_PREFERENCES,
        **_IDS,
        **_all("used", "the conversation", "messages"),
        **_all("used", "functions that the assistant may call, for the chat template", "tools"),
        **_all("used", "documents that the conversation is about, for the chat template", "documents"),
        **_all("used", "further variables of the chat template", "chat_template_kwargs"),
        **_all("ignored", "repeats the first message", "prompt"),
        **_all("ignored", "says how functions are called, which a text does not", "parallel_tool_calls", "tool_choice"),
        **_all("refused", 'functions of the older format; write them as "tools"', "functions", "function_call"),
        **_all("refused", "a message outside the conversation; put it first among the messages", "system", "system_prompt", "instruction"),
        **_all("refused", "text outside the conversation; put it among the messages", "conversations", "history", "completion", "response", "query"),
        **_all("refused", "all rows have one template; name it with --chat-template FILE", "chat_template"),
        **_all("refused", "all rows are learnt; leave it out", "label", "labels"),
    },
    "message": {
        **_MEDIA,
        **_all("used", "the role of the speaker", "role"),
        **_all("used", "the text of the message", "content"),
        **_all("used", "1 or 0: whether an answer is learnt", "weight"),
        **_all("written", "functions that the assistant calls", "tool_calls", "function_call"),
        **_all("written", "the reasoning of the assistant before its answer", "reasoning_content", "reasoning", "thinking"),
        **_all("written", "the words of the assistant instead of an answer", "refusal"),
        **_all("ignored", "names the message", "id", "uuid", "timestamp", "created", "model", "index"),
        **_all("ignored", "written by templates that know it", "name", "tool_call_id", "annotations"),
        **_all("refused", 'an answer with "weight": 0 is not learnt; use that', "train", "training", "loss", usual=True),
        **_all("refused", 'an answer with "weight": 0 is not learnt; use that', "train_detail", "loss_scale", "mask"),
        **_all("refused", "messages are whole; join it with the message that it begins", "prefix", "partial"),
    },
}
"""Kind of row -> key -> rule."""

_OTHER_FORMATS: Final = (
    (
        frozenset(("conversations",)),
        'conversations of another format; write each as {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
    ),
    (frozenset(("chosen", "rejected")), 'preferences, which are not learnt; keep the better answers as {"messages": [...]}'),
    (frozenset(("prompt", "completion")), 'a prompt and its completion; write them as {"messages": [...]} or {"text": "..."}'),
    (frozenset(("instruction", "output")), 'an instruction and its output; write them as {"messages": [...]} or {"text": "..."}'),
)
"""Keys that identify the format of another program, with a description of its rows and the remedy, for error messages."""


def is_nothing(value: Any) -> bool:
    """Return whether a value is equivalent to a missing key."""
    return value is None or value is False or value in ("", [], {})


def unknown_keys(values: Mapping[str, Any], kind: RowKind, where: str) -> list[str]:
    """Return the keys of a row or message that have no rule for its kind; `where` is its position, for error messages.

    Raises:
        DataError: a key is refused.
    """
    rules, unknown = ROW_KEYS[kind], []
    for key, value in values.items():
        rule = rules.get(key)
        if rule is None:
            unknown.append(key)
        elif rule.is_refused(value):
            what = "a message with" if kind == "message" else ""
            raise DataError(f'{where} has {what}{" " if what else ""}"{key}", which is not read: {rule.reason}, or remove the key')
    return unknown


def format_hint(keys: Iterable[str]) -> str:
    """Return a description of a row in a known format of another program, with the remedy; "" for any other row."""
    found = set(keys)
    return next((hint for names, hint in _OTHER_FORMATS if names <= found), "")
