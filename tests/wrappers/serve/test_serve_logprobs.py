"""Probabilities of tokens that are no whole characters: their bytes are the text, their offsets lie in it, and no two of the best look alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from support.served import LETTERS, served, write_served_model
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers, pre_tokenizers

from nntask.data.byte_letters import byte_letters
from nntask.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer
from nntask.inference import TokenBytes, TokenScore
from nntask.inference.spelling import HALF
from wrappers.serve.answers import Form, ToldToken
from wrappers.serve.engine import Piece
from wrappers.serve.jobs import Progress, Prompt
from wrappers.serve.pieces import TextPieces
from wrappers.serve.schema import completion

TEXTS = st.text(alphabet="ab é€😀\u2028 ", max_size=12)


def byte_level() -> BpeTokenizer:
    """A byte-level BPE with some merges, one of which ends inside a character."""
    letters = list(byte_letters().values())
    a, b, first, second = "a", "b", *(byte_letters()[byte] for byte in "é".encode())
    merges = [(a, b), (first, second), (byte_letters()[0x20], a), (byte_letters()[0xF0], byte_letters()[0x9F])]
    words = [*letters, *("".join(pair) for pair in merges)]
    inner = Inner(models.BPE({word: at for at, word in enumerate(words)}, merges))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    return BpeTokenizer(inner)


def sentence_piece() -> BpeTokenizer:
    """A BPE as LLaMA 2's: spaces as letters of their own, one put in front of a text, and bytes for what has no letter."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "é", "\u2581a", "ab"]
    merges = [("\u2581", "a"), ("a", "b")]
    inner = Inner(models.BPE({word: at for at, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(parts)
    return BpeTokenizer(inner)


KINDS: dict[str, Callable[[], Tokenizer]] = {"byte-level": byte_level, "sentence piece": sentence_piece, "plain bytes": ByteTokenizer}


def num_whole(data: bytes) -> int:
    """Whole characters that bytes begin with."""
    while data:
        try:
            return len(data.decode())
        except UnicodeDecodeError as error:
            data = data[: error.start]
    return 0


def answered(tokenizer: Tokenizer, prompt: Sequence[int], prompt_text: str, new: Sequence[int], *, echo: bool, is_stream: bool) -> tuple[str, dict]:
    """The text and the probabilities of an answer that says `new`, as a client joins them."""
    asked = completion({"model": "m", "prompt": "x", "logprobs": 0, "echo": echo, "max_tokens": 99})
    words = TokenBytes(tokenizer)
    form = Form(is_chat=False, name="n", created=0, model="m", fingerprint="f", words=words, tells_scores=True)
    progress = Progress(asked, [Prompt(tuple(prompt), prompt_text)], form, tokenizer.decode, words)
    pieces, text = TextPieces(tokenizer.decode, prompt, ()), ""
    joined: dict[str, list] = {"tokens": [], "text_offset": []}
    told = tuple(TokenScore(token, -1.0, ()) for token in prompt[1:])
    for number, token in enumerate(new):
        scores = ((pieces.num_spelled, TokenScore(token, -1.0, ())),)
        is_last = number == len(new) - 1
        piece = Piece(0, pieces.add(token) + (pieces.end() if is_last else ""), scores, number + 1, 0, "length" if is_last else None, told)
        said, found = progress.add(piece)
        told, text = (), text + said
        event = json.loads(form.more(0, said, found, piece.end).removeprefix(b"data: "))["choices"][0]
        for key, values in joined.items():
            values.extend(event["logprobs"][key] if event["logprobs"] else [])
    if is_stream:
        return text, joined
    whole = progress.answer()["choices"][0]
    return whole["text"], whole["logprobs"]


@pytest.mark.parametrize("kind", KINDS)
@given(prompt=TEXTS.filter(bool), text=TEXTS.filter(bool), echo=st.booleans(), is_stream=st.booleans())
def test_tokens_are_the_text(kind: str, prompt: str, text: str, echo: bool, is_stream: bool) -> None:
    """Bytes joined are the text, and each offset counts whole characters in front of its token; with and without the prompt, whole or streamed."""
    tokenizer = KINDS[kind]()
    words = TokenBytes(tokenizer)
    before, ids = ([int(i) for i in tokenizer.encode([each])[0]] for each in (prompt, text))
    found, told = answered(tokenizer, before, prompt, ids, echo=echo, is_stream=is_stream)
    tokens = [*(before if echo else ()), *ids]
    assert len(told["tokens"]) == len(told["text_offset"]) == len(tokens)
    data, offsets = b"", []
    for at, token in enumerate(tokens):
        offsets.append(num_whole(data))
        data += words.of(token)[1 if kind == "sentence piece" and echo and at == 0 else 0 :]
    assert data.decode() == found
    assert told["text_offset"] == offsets
    spelled = b"".join(bytes.fromhex(word[6:].replace("\\x", "")) if word.startswith("bytes:") else word.encode() for word in told["tokens"])
    assert spelled == data


@pytest.mark.parametrize("kind", ["byte-level", "plain bytes"])
@given(data=st.lists(st.sampled_from(list(b"a \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80")), min_size=1, max_size=12))
def test_offsets_of_bytes_that_are_no_text(kind: str, data: list[int]) -> None:
    """Bytes one by one, with halves of characters among them: each begins where its character or its sign of replacement stands in the text."""
    tokenizer = KINDS[kind]()
    ids = [int(tokenizer.encode([chr(byte)])[0][0]) if byte < 128 else byte_id(tokenizer, byte) for byte in data]
    text, told = answered(tokenizer, [int(i) for i in tokenizer.encode(["b"])[0]], "b", ids, echo=False, is_stream=False)
    assert text == bytes(data).decode(errors="replace")
    wants = []
    for at in range(len(data)):
        front = bytes(data[:at]).decode(errors="replace")
        goes_on = front.endswith("\ufffd") and len(bytes(data[: at + 1]).decode(errors="replace")) == len(front)
        wants.append(len(front) - goes_on)
    assert told["text_offset"] == wants


def byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """The id of a byte."""
    return int(tokenizer.inner.token_to_id(byte_letters()[byte])) if isinstance(tokenizer, BpeTokenizer) else byte


def returned(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text of an answer that ends with `ids`."""
    pieces = TextPieces(tokenizer.decode, before, ())
    return "".join(map(pieces.add, ids)) + pieces.end()


def certain(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> int:
    """Characters of `ids` that no further token changes."""
    pieces = TextPieces(tokenizer.decode, before, ())
    for token in ids:
        pieces.add(token)
    return pieces.num_spelled


BYTES = st.sampled_from([*(1 + byte for byte in b"a \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xff"), 257, 258, 260, 261, 0])
"""Ids of bytes and of words."""


def wanted(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> list[int]:
    """Offsets from the texts of all prefixes: of a token whose character was told by some prefix, that character's, else its place from the end."""
    found = []
    for at in range(len(ids)):
        low = certain(tokenizer, before, ids[:at])
        end = next((to for to in range(at, len(ids)) if certain(tokenizer, before, ids[: to + 1]) > low), None)
        upto = len(ids) if end is None else end + 1
        text = returned(tokenizer, before, ids[:upto])
        words = TokenBytes(tokenizer)
        tail = ids[at:upto]
        run = next((size for size, token in enumerate(tail) if words.byte(token) is None), len(tail))
        if not run:  # a word: in front of it all of the text before
            found.append(len(returned(tokenizer, before, ids[:at])))
        elif HALF not in text[low:]:
            found.append(low)
        else:  # a sign for each byte, up to the end of the run
            after = len(returned(tokenizer, before, ids[: at + run]))
            found.append(after - run)
    return found


@given(before=st.lists(BYTES, max_size=4), ids=st.lists(BYTES, min_size=1, max_size=9), is_stream=st.booleans())
def test_offsets_of_bytes_of_sentence_piece(before: list[int], ids: list[int], is_stream: bool) -> None:
    """Runs of bytes that are characters or not, beside words, behind any prompt: as the texts of prefixes have them, whole or streamed."""
    tokenizer = sentence_piece()
    text, told = answered(tokenizer, [259, *before], "b", ids, echo=False, is_stream=is_stream)
    assert text == returned(tokenizer, [259, *before], ids)
    assert told["text_offset"] == wanted(tokenizer, [259, *before], ids)


@pytest.mark.parametrize(
    ("data", "text", "offsets"),
    [
        (b"\xe2\x82\xac", "€", [0, 0, 0]),
        (b"\xe2\x82\xff", "\ufffd" * 3, [0, 1, 2]),
        (b"\xc3\xa9\xc3\xa9", "éé", [0, 0, 1, 1]),
        (b"\xc3\xa9\xff", "é\ufffd\ufffd", [0, 0, 2]),  # the run is replaced from its last told character on, which stays
        (b"\xff\xc3\xa9", "\ufffd" * 3, [0, 1, 2]),
        (b"\xe2\x82", "\ufffd" * 2, [0, 1]),
    ],
)
def test_where_a_byte_of_sentence_piece_is(data: bytes, text: str, offsets: list[int]) -> None:
    """Whole characters have all their bytes, a run that is no text has a sign for each; a word behind it begins after all signs."""
    tokenizer = sentence_piece()
    for is_stream in (False, True):
        found, told = answered(tokenizer, [259], "b", [*(1 + byte for byte in data), 259], echo=False, is_stream=is_stream)
        assert (found, told["text_offset"]) == (f"{text}b", [*offsets, len(text)])


@given(ids=st.lists(BYTES, min_size=1, max_size=9))
def test_offsets_of_a_prompt_of_ids(ids: list[int]) -> None:
    """An echoed prompt is decoded as a whole, and so are its runs."""
    tokenizer, words = sentence_piece(), TokenBytes(sentence_piece())
    prompt = [259, *ids]
    text, told = answered(tokenizer, prompt, "", [259], echo=True, is_stream=False)
    assert text == tokenizer.decode(prompt) + "b"
    for at, offset in enumerate(told["text_offset"][:-1]):
        first = next((back + 1 for back in range(at - 1, -1, -1) if words.byte(prompt[back]) is None), 0)
        last = next((to for to in range(at, len(prompt)) if words.byte(prompt[to]) is None), len(prompt))
        start = len(tokenizer.decode(prompt[:first]))
        run = bytes(words.of(token)[0] for token in prompt[first:last])
        is_text = "\ufffd" not in run.decode(errors="replace")
        assert offset == start + (num_whole(run[: at - first]) if is_text else at - first)


def test_special_tokens_and_ids_that_are_none() -> None:
    """A special token is spelled, though texts leave it out; an id beyond the tokenizer's is nothing."""
    words = TokenBytes(byte_level())
    assert words.word(260) == "<|end|>"
    assert (words.of(9999), words.word(9999)) == (b"", "")
    assert TokenBytes(ByteTokenizer()).of(256) == b""


def test_halves_of_characters_do_not_share_a_key() -> None:
    """Of five best tokens that are bytes of characters, five are told."""
    words = TokenBytes(byte_level())
    form = Form(is_chat=False, name="n", created=0, model="m", fingerprint="f", words=words, tells_scores=True)
    best = [byte_level().inner.token_to_id(byte_letters()[byte]) for byte in (0xF0, 0x9F, 0x98, 0x80, 0xC3)]
    score = TokenScore(best[0], -0.5, tuple((token, -0.5 - at) for at, token in enumerate(best)))
    event = json.loads(form.more(0, "", [ToldToken(best[0], 0, score)], None).removeprefix(b"data: "))
    (top,) = event["choices"][0]["logprobs"]["top_logprobs"]
    assert top == {"bytes:\\xf0": -0.5, "bytes:\\x9f": -1.5, "bytes:\\x98": -2.5, "bytes:\\x80": -3.5, "bytes:\\xc3": -4.5}


def test_bytes_over_http(tmp_path: Path) -> None:
    """A letter of two tokens, forced by a bias: a client joins the bytes of a conversation, and an echo of ids is their text."""
    model = write_served_model(tmp_path / "small")
    assert load_file(model / "model.safetensors")
    first, second = LETTERS.index("\u00c3"), LETTERS.index("\u00a9")
    with served(model, "--ram", "256MiB") as server, server.client() as client:
        for token in (first, second):
            found = client.completions.create(
                model="small", prompt=[first, second], echo=True, max_tokens=1, logprobs=1, temperature=0, logit_bias={str(token): 100}
            ).choices[0]
            assert found.logprobs is not None
            assert found.logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xc3" if token == first else "bytes:\\xa9"]
            assert found.logprobs.text_offset == [0, 0, 1]
            assert found.text.startswith("é")
        chat = client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=4,
            logprobs=True,
            temperature=0,
            logit_bias={str(first): 100, str(second): 99.5},
            frequency_penalty=2,
        ).choices[0]
        assert chat.logprobs is not None
        assert chat.logprobs.content is not None
        data = b"".join(bytes(each.bytes or []) for each in chat.logprobs.content)
        assert data.decode(errors="replace") == chat.message.content
        assert {0xC3, 0xA9} >= set(data)
