"""Hostile files of models: headers and indices of safetensors, GGUF, configs and tokenizers. See `hostile_inputs`."""

from __future__ import annotations

import json
import struct
from typing import Any, Final

import numpy as np
from support.untrusted import gguf_with, valid_files

MIB: Final = 1 << 20
WHOLE: Final = valid_files("safetensors")["model.safetensors"]
LENGTH: Final = int.from_bytes(WHOLE[:8], "little")
HEADER: Final = json.loads(WHOLE[8 : 8 + LENGTH])
FIRST: Final = next(name for name in HEADER if name != "__metadata__")


def raw_header(text: str | bytes, data: bytes = WHOLE[8 + LENGTH :], length: int | None = None) -> bytes:
    """A file with that text as its header."""
    raw = text.encode() if isinstance(text, str) else text
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def entry(**changes: Any) -> bytes:
    """The valid file with a changed entry of its first tensor."""
    return raw_header(json.dumps({**HEADER, FIRST: {**HEADER[FIRST], **changes}}))


def one(shape: Any, offsets: Any, data: bytes = b"", dtype: Any = "F32", **more: Any) -> bytes:
    """A file of one tensor."""
    return raw_header(json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}}), data)


def many(count: int, entry_of: Any) -> bytes:
    """A file of many tensors without values."""
    return raw_header("{" + ",".join(entry_of(number) for number in range(count)) + "}", b"")


EMPTY: Final = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
SAFETENSORS: Final = {
    "a header of one space": raw_header(" "),
    "a header that ends within a text": raw_header('{"w": {"dtype": "F'),
    "text after the object": raw_header(json.dumps(HEADER) + "x"),
    "a second object after the first": raw_header(json.dumps(HEADER) + json.dumps(HEADER)),
    "comments as in JSON5": raw_header("/* a */" + json.dumps(HEADER)),
    "a comma before the end": raw_header(json.dumps(HEADER)[:-1] + ",}"),
    "shape below zero twice": one([-2, -2], [0, 16], bytes(16)),
    "shape whose product wraps at 2^64": one([1 << 32, 1 << 32], [0, 0]),
    "shape of ten thousand ones": one([1] * 10_000, [0, 4], bytes(4)),
    "shape of a hundred thousand zeros": one([0] * 100_000, [0, 0]),
    "an entry that is null": raw_header('{"w": null}'),
    "an entry that is a list": raw_header('{"w": ["F32", [4], [0, 16]]}', bytes(16)),
    "offsets the wrong way round": entry(data_offsets=HEADER[FIRST]["data_offsets"][::-1]),
    "three offsets": entry(data_offsets=[0, 4, 8]),
    "one offset": entry(data_offsets=[0]),
    "offsets as an object": entry(data_offsets={"0": 0, "1": 4}),
    "offsets of NaN": raw_header('{"w":{"dtype":"F32","shape":[1],"data_offsets":[NaN,Infinity]}}', bytes(4)),
    "an element type that is a list": entry(dtype=["F32"]),
    "an element type that is an object": entry(dtype={"F32": 1}),
    "an element type of 4 bits": entry(dtype="F4"),
    "an element type of a MiB": lambda: entry(dtype="F" * MIB),
    "an empty name": raw_header('{"":' + EMPTY + "}", b""),
    "names of NUL, escapes and line feeds": raw_header('{"\\u0000\\u001b[2J\\n":{"dtype":"X","shape":[],"data_offsets":[0,0]}}', b""),
    "a name of half a pair of UTF-16": raw_header('{"\\ud800":{"dtype":"X","shape":[],"data_offsets":[0,0]}}', b""),
    "metadata that are text": raw_header('{"__metadata__":"a",' + json.dumps(HEADER)[1:]),
    "metadata of lists": raw_header(json.dumps({**HEADER, "__metadata__": {"a": [1]}})),
    "fifty thousand tensors without values": lambda: many(50_000, lambda number: f'"w{number}":{EMPTY}'),
    "a million empty lists in a shape": lambda: raw_header('{"w":{"dtype":"F32","data_offsets":[0,0],"shape":[' + "[]," * MIB + "0]}}", b""),
    "three million empty objects": lambda: raw_header('{"w":[' + "{}," * (3 * MIB) + "0]}", b""),
    "brackets to the depth of the stack": lambda: raw_header('{"w":' + "[" * 200_000),
    "two bytes of header and nothing": raw_header("{}", b""),
    "two bytes of header and data": raw_header("{}", bytes(100)),
    "a length that is one too large": raw_header("{}", b"", 3),
    "a length of 2^63 - 1": raw_header("{}", b"", (1 << 63) - 1),
}
INDEX: Final = json.loads(valid_files("index")["model.safetensors.index.json"])
SHARD: Final = next(iter(INDEX["weight_map"].values()))


def index(**changes: Any) -> bytes:
    """The valid index with changes."""
    return json.dumps({**INDEX, **changes}).encode()


def mapped(name: Any) -> bytes:
    """The valid index with another file for one tensor."""
    first = next(iter(INDEX["weight_map"]))
    return index(weight_map={**INDEX["weight_map"], first: name})


INDICES: Final = {
    "empty": b"",
    "a list": b"[]",
    "null": b"null",
    "no UTF-8": b"\xff\xfe" + json.dumps(INDEX).encode("utf-16-le"),
    "a map that is a list": index(weight_map=list(INDEX["weight_map"].items())),
    "a map that is null": index(weight_map=None),
    "an empty map": index(weight_map={}),
    "a map of numbers": mapped(7),
    "a map of lists": mapped([SHARD]),
    "a map of objects": mapped({SHARD: 1}),
    "a file above": mapped(f"../{SHARD}"),
    "a file above, with the other slash": mapped(f"..\\{SHARD}"),
    "a device": mapped("/dev/zero"),
    "two dots": mapped(".."),
    "a slash at the end": mapped(f"{SHARD}/"),
    "a NUL in the name": mapped(f"{SHARD}\0"),
    "half a pair of UTF-16": b'{"weight_map": {"a": "\\ud83d"}}',
    "escapes in the name": mapped("\x1b]0;a\x07\n.safetensors"),
    "the index itself": mapped("model.safetensors.index.json"),
    "the config as a shard": mapped("config.json"),
    "a name of another case": mapped(SHARD.upper()),
    "a hundred thousand names": lambda: index(weight_map={f"w{number}": f"{number}.safetensors" for number in range(100_000)}),
    "a million empty lists": lambda: index(metadata=[]).replace(b"[]", b"[" + b"[]," * MIB + b"0]", 1),
    "brackets without end": lambda: b'{"weight_map":' + b"[" * 500_000,
    "objects without end": lambda: b'{"weight_map":' * 100_000,
    "a tensor of an empty name": index(weight_map={**INDEX["weight_map"], "": SHARD}),
    "a total of 10^400": index(metadata={"total_size": 10**400}),
}


def _text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def gguf(*pairs: bytes, num_keys: int | None = None, num_tensors: int = 0, tensors: bytes = b"") -> bytes:
    """A file of keys and entries of tensors."""
    count = len(pairs) if num_keys is None else num_keys
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + b"".join(pairs) + tensors + bytes(64)


def metadata() -> dict[str, Any]:
    """The metadata of the valid file."""
    import tempfile
    from pathlib import Path

    from nntask.io.gguf_file import GgufFile

    with tempfile.TemporaryDirectory() as place:
        (path := Path(place) / "model.gguf").write_bytes(valid_files("GGUF")["model.gguf"])
        return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in GgufFile(path).metadata.items()}


def keyed(**changes: Any) -> Any:
    """A function to the valid file with other values under keys, whose dots are two lines here; None for no such key."""
    return lambda: gguf_with({key: value for key, value in {**metadata(), **_dotted(changes)}.items() if value is not None})


def _dotted(changes: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in changes.items()}


def pieces(tokens: list[str], **more: Any) -> Any:
    """A function to the valid file with a vocabulary of SentencePiece's."""
    scores, kinds = [0.0] * len(tokens), [1] * len(tokens)
    own = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": kinds}

    def made() -> bytes:
        given = {**metadata(), **own, **_dotted(more)}
        del given["tokenizer.ggml.merges"]
        return gguf_with(given)

    return made


ARCHITECTURE: Final = _text("general.architecture") + struct.pack("<I", 8) + _text("gpt2")
GGUF: Final = {
    "magic alone": b"GGUF",
    "a header without its counts": b"GGUF" + struct.pack("<I", 3),
    "counts that use the whole file": gguf(ARCHITECTURE, num_keys=7, num_tensors=1),
    "a key without letters": gguf(_text("") + struct.pack("<II", 4, 1), ARCHITECTURE),
    "a key of 100,000 letters": gguf(_text("a" * 100_000) + struct.pack("<II", 4, 1)),
    "a bool of 255": gguf(_text("a") + struct.pack("<IB", 7, 255), ARCHITECTURE),
    "an empty list of texts": gguf(_text("a") + struct.pack("<IIQ", 9, 8, 0), ARCHITECTURE),
    "a list of numbers that is cut": gguf(_text("a") + struct.pack("<IIQ", 9, 12, 100)),
    "overlong UTF-8": gguf(_text(b"\xc0\x80") + struct.pack("<II", 4, 1)),
    "half a pair of UTF-16 as UTF-8": gguf(_text("a") + struct.pack("<I", 8) + _text(b"\xed\xa0\x80")),
    "two hundred thousand keys": lambda: gguf(*(_text(f"k{number}") + struct.pack("<II", 4, 1) for number in range(200_000))),
    "200,000 texts without letters": lambda: gguf(_text("a") + struct.pack("<IIQ", 9, 8, 200_000) + bytes(1_600_000), ARCHITECTURE),
    "200,000 texts of two letters": lambda: gguf(_text("a") + struct.pack("<IIQ", 9, 8, 200_000) + _text("ab") * 200_000, ARCHITECTURE),
    "a hundred thousand tensors of one value": lambda: gguf(
        ARCHITECTURE,
        num_tensors=100_000,
        tensors=b"".join(_text(f"t{number}") + struct.pack("<IQIQ", 1, 1, 0, 32 * number) for number in range(100_000)),
    ),
    "an architecture that is a number": keyed(general__architecture=7),
    "no architecture": keyed(general__architecture=None),
    "a file type that is text": keyed(general__file_type="F32"),
    "heads that are a list": keyed(gpt2__attention__head_count=[3, 3]),
    "blocks that are NaN": keyed(gpt2__block_count=float("nan")),
    "an epsilon of infinity": keyed(gpt2__attention__layer_norm_epsilon=float("inf")),
    "a context of 2^63": keyed(gpt2__context_length=1 << 63),
    "a template of a MiB": keyed(tokenizer__chat_template="{{ a }}" * (MIB // 7)),
    "a template that is a list": keyed(tokenizer__chat_template=["a"]),
    "an own tokenizer of a million brackets": keyed(tokenizer__huggingface__json="[" * MIB),
    "an own tokenizer of empty lists": keyed(tokenizer__huggingface__json='{"model":{"vocab":[' + "[]," * (2 * MIB) + "0]}}"),
    "an own tokenizer with ids of 10^400": keyed(tokenizer__huggingface__json='{"model":{"vocab":{"a":1' + "0" * 400 + "}}}"),
    "types of fewer tokens": keyed(tokenizer__ggml__token_type=[1]),
    "types that are texts": keyed(tokenizer__ggml__token_type=["1"] * 300),
    "a begin that is text": keyed(tokenizer__ggml__bos_token_id="0"),
    "an end of -1": keyed(tokenizer__ggml__eos_token_id=-1),
    "merges of empty texts": keyed(tokenizer__ggml__merges=[""] * 1000),
    "merges of spaces alone": keyed(tokenizer__ggml__merges=["   "] * 1000),
    "pieces that are one token 12,000 times": pieces(["a" * 200] * 12_000),
    "pieces of which all parts are tokens": pieces(["a" * left + "b" * right for left in range(180) for right in range(180 - left) if left + right]),
    "all words of two letters as pieces": pieces([f"{number:b}" for number in range(1, 1 << 15)]),
    "scores of NaN": pieces(["a", "b"], tokenizer__ggml__scores=[float("nan")] * 2),
    "shards by metadata alone": keyed(split__count=2, split__no=0),
    "sixty-five thousand shards": keyed(split__count=65_535, split__no=0),
}
PLAIN: Final = json.loads(valid_files("config")["config.json"])


def config(**changes: Any) -> bytes:
    """The valid config with changes."""
    return json.dumps({**PLAIN, **changes}).encode()


def llama(**changes: Any) -> bytes:
    """A config of a LLaMA with changes."""
    from support.untrusted import family_configs

    return json.dumps({**family_configs()["llama"], **changes}).encode()


CONFIGS: Final = {
    "empty": b"",
    "white space": b" \n\t" * 1000,
    "a number": b"7",
    "a text": b'"gpt2"',
    "NaN": b"NaN",
    "no UTF-8": b'{"model_type": "\xff"}',
    "NUL bytes": bytes(1000),
    "UTF-32": json.dumps(PLAIN).encode("utf-32"),
    "a key twice, with other values": json.dumps(PLAIN).encode()[:-1] + b', "n_layer": 1000000}',
    "a type that is a list": config(model_type=["gpt2"]),
    "a type that is null": config(model_type=None),
    "a type of a MiB": lambda: config(model_type="g" * MIB),
    "a type of escapes": config(model_type="\x1b[2J\n"),
    "a type with half a pair of UTF-16": config(model_type="\ud800"),
    "heads that do not divide": config(n_head=5),
    "a width of 10^400": config(n_embd=10**400),
    "a width of 5,000 digits": b'{"model_type": "gpt2", "n_embd": ' + b"9" * 5000 + b"}",
    "a width that is true": config(n_embd=True),
    "a width that is text": config(n_embd="12"),
    "an epsilon of -1e308": config(layer_norm_epsilon=-1e308),
    "an epsilon that is a list": config(layer_norm_epsilon=[1e-5]),
    "an activation that is a list": config(activation_function=["gelu"]),
    "an activation of another model": config(activation_function="xielu"),
    "a dropout of 1": config(resid_pdrop=1),
    "a dropout of 10^400": config(resid_pdrop=10**400),
    "an end beyond the vocabulary": config(eos_token_id=1 << 40),
    "ends that are a list of lists": config(eos_token_id=[[1]]),
    "labels of a hundred thousand names": lambda: config(id2label={str(number): f"name {number}" for number in range(100_000)}),
    "labels of wrong keys": config(id2label={"a": "b", "": None}),
    "a quantisation of others": config(quantization_config={"quant_method": "gptq", "bits": [4]}),
    "code of its own": config(auto_map={"AutoConfig": "evil--evil.Config", "AutoModel": "../../evil.py"}),
    "a million empty objects": lambda: json.dumps(PLAIN).encode()[:-1] + b', "a": [' + b"{}," * (2 * MIB) + b"0]}",
    "rotary scaling of an unknown kind": llama(rope_scaling={"rope_type": "x" * 1000, "factor": 2}),
    "rotary scaling that is a list": llama(rope_scaling=[2]),
    "a rotary base of 0": llama(rope_theta=0),
    "a head of 2^40": llama(head_dim=1 << 40),
    "shared heads that do not divide": llama(num_key_value_heads=7),
    "no shared heads": llama(num_key_value_heads=0),
}
TOKENIZER: Final = json.loads(valid_files("tokenizer")["tokenizer.json"])


def tokenizer(**changes: Any) -> bytes:
    """The valid tokenizer with changes."""
    return json.dumps({**TOKENIZER, **changes}).encode()


def bpe(**changes: Any) -> bytes:
    """The valid tokenizer with changes of its model."""
    return tokenizer(model={**TOKENIZER["model"], **changes})


def beside(name: str, content: bytes) -> dict[str, bytes]:
    """A file beside the valid tokenizer."""
    return {name: content}


TOKENIZERS: Final = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "no UTF-8": b"\xff" + json.dumps(TOKENIZER).encode(),
    "cut in the middle": json.dumps(TOKENIZER).encode()[:1000],
    "a model that is null": tokenizer(model=None),
    "a model of no known type": tokenizer(model={"type": "Evil", "vocab": {}}),
    "a vocabulary that is null": bpe(vocab=None),
    "an empty vocabulary": bpe(vocab={}, merges=[]),
    "ids below zero": bpe(vocab={"a": -1}, merges=[]),
    "ids that are texts": bpe(vocab={"a": "0"}, merges=[]),
    "all tokens of one id": bpe(vocab=dict.fromkeys(TOKENIZER["model"]["vocab"], 0)),
    "merges of unknown tokens": bpe(merges=[["zz", "yy"]]),
    "merges of three": bpe(merges=[["a", "b", "c"]]),
    "merges that are numbers": bpe(merges=[1, 2]),
    "a dropout of 7": bpe(dropout=7),
    "an unknown token that is not there": bpe(unk_token="nowhere"),
    "a normalizer of no known type": tokenizer(normalizer={"type": "Evil"}),
    "a pattern that is no pattern": tokenizer(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(((("}, "behavior": "Isolated", "invert": False}),
    "added tokens that are null": tokenizer(added_tokens=None),
    "an added token without letters": tokenizer(
        added_tokens=[{"id": 5, "content": "", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}]
    ),
    "brackets without end": lambda: b"[" * MIB,
    "a template of special tokens that are not there": tokenizer(
        post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [], "special_tokens": {}}
    ),
    "a tokenizer_config.json that is a list": beside("tokenizer_config.json", b"[]"),
    "a tokenizer_config.json of empty lists": lambda: beside("tokenizer_config.json", b'{"a":[' + b"[]," * (2 * MIB) + b"0]}"),
    "an end of half a pair of UTF-16": beside("special_tokens_map.json", b'{"eos_token": "\\ud800"}'),
    "an end that is a number": beside("special_tokens_map.json", b'{"eos_token": 7}'),
    "an end that is an object of numbers": beside("special_tokens_map.json", b'{"eos_token": {"content": 7}}'),
    "added tokens of ids below zero": beside("tokenizer_config.json", b'{"added_tokens_decoder": {"-1": {"content": "a"}}}'),
    "added tokens of no ids": beside("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "a"}}}'),
    "added tokens that are a list": beside("tokenizer_config.json", b'{"added_tokens_decoder": [1, 2]}'),
    "added tokens that are texts": beside("tokenizer_config.json", b'{"added_tokens_decoder": {"5": "a"}}'),
    "ends in a generation config that are texts": beside("generation_config.json", b'{"eos_token_id": "a"}'),
    "ends in a generation config beyond 2^64": beside("generation_config.json", b'{"eos_token_id": [18446744073709551616]}'),
}
