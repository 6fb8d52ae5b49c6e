"""llama.cpp through the library inside the package xllamacpp: ids, logits and greedy tokens of a GGUF file, and ggml's own quantisation.

The package's Python API serves texts; logits and quantisation come from the C functions of its extension module, called through ctypes. Parameter
structures are opaque here: llama.cpp fills them with defaults, and only the fields at the head of `_ContextParams` are set.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

ROOM: Final = 1024
"""Bytes for a parameter structure, more than llama.cpp has in any of its structures; what is left over is ignored."""
GGML_TYPES: Final = {"q4_0": 2, "q4_1": 3, "q8_0": 8}
"""Numbers of ggml's types."""


class _Opaque(ctypes.Structure):
    _fields_ = (("room", ctypes.c_uint8 * ROOM),)


class _ContextParams(ctypes.Structure):
    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("room", ctypes.c_uint8 * ROOM),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_LOG: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_silent: Final = _LOG(lambda level, text, data: None)


@cache
def library() -> Any:
    """The C functions, with their types."""
    import xllamacpp.xllamacpp as extension

    found = ctypes.CDLL(extension.__file__)
    pointer, integer = ctypes.c_void_p, ctypes.c_int32
    types: dict[str, tuple[Any, list[Any]]] = {
        "llama_log_set": (None, [_LOG, pointer]),
        "llama_model_default_params": (_Opaque, []),
        "llama_context_default_params": (_ContextParams, []),
        "llama_model_load_from_file": (pointer, [ctypes.c_char_p, _Opaque]),
        "llama_init_from_model": (pointer, [pointer, _ContextParams]),
        "llama_model_get_vocab": (pointer, [pointer]),
        "llama_vocab_n_tokens": (integer, [pointer]),
        "llama_tokenize": (
            integer,
            [pointer, ctypes.c_char_p, integer, ctypes.POINTER(integer), integer, ctypes.c_bool, ctypes.c_bool],
        ),
        "llama_batch_init": (_Batch, [integer, integer, integer]),
        "llama_batch_free": (None, [_Batch]),
        "llama_decode": (integer, [pointer, _Batch]),
        "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), [pointer, integer]),
        "llama_set_n_threads": (None, [pointer, integer, integer]),
        "llama_free": (None, [pointer]),
        "llama_model_free": (None, [pointer]),
        "ggml_quantize_chunk": (ctypes.c_size_t, [ctypes.c_int, pointer, pointer, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, pointer]),
        "ggml_row_size": (ctypes.c_size_t, [ctypes.c_int, ctypes.c_int64]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    found.llama_log_set(_silent, None)
    return found


def ggml_quantised(values: np.ndarray, kind: str) -> np.ndarray:
    """The bytes of a matrix as ggml itself quantises it.

    Args:
        values: (rows, columns), fp32.
        kind: a name in `GGML_TYPES`.

    Returns:
        (rows, bytes of a row), uint8.
    """
    rows, columns = values.shape
    given = np.ascontiguousarray(values, np.float32)
    out = np.empty((rows, library().ggml_row_size(GGML_TYPES[kind], columns)), np.uint8)
    written = library().ggml_quantize_chunk(GGML_TYPES[kind], given.ctypes.data, out.ctypes.data, 0, rows, columns, None)
    assert written == out.nbytes
    return out


class LlamaCpp:
    """A GGUF file opened by llama.cpp.

    Args:
        path: the file.
        context: most tokens of a text.

    Raises:
        ValueError: llama.cpp does not open the file.
    """

    def __init__(self, path: Path, context: int) -> None:
        self._lib = library()
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), self._lib.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp does not open {path.name}")
        self._context = context
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self.vocab_size: int = self._lib.llama_vocab_n_tokens(self._vocab)

    def ids(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text, with what llama.cpp adds to it; `special` reads the names of special tokens as these."""
        data = text.encode()
        room = (ctypes.c_int32 * (len(data) + 8))()
        count = self._lib.llama_tokenize(self._vocab, data, len(data), room, len(room), True, special)
        return list(room[:count])

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits behind each token of a text, (tokens, vocabulary)."""
        with self._opened() as context:
            return self._decoded(context, ids, 0)

    def greedy(self, ids: Sequence[int], count: int, stop: Sequence[int] = ()) -> list[int]:
        """At most `count` best tokens behind a text, up to the first of `stop`, which is left out."""
        new: list[int] = []
        with self._opened() as context:
            last = self._decoded(context, ids, 0)[-1]
            while len(new) < count and (best := int(last.argmax())) not in stop:
                new.append(best)
                last = self._decoded(context, [best], len(ids) + len(new) - 1)[-1]
        return new

    def steps(self, ids: Sequence[int], threads: int) -> Iterator[np.ndarray]:
        """Yield the logits behind each token of a text, (vocabulary,), computed one token at a time."""
        with self._opened() as context:
            self._lib.llama_set_n_threads(context, threads, threads)
            for at, token in enumerate(ids):
                yield self._decoded(context, [token], at)[0]

    def perplexity(self, ids: Sequence[int]) -> float:
        """Of the tokens behind the first one."""
        logits = self.logits(ids)[:-1].astype(np.float64)
        peak = logits.max(1, keepdims=True)
        normaliser = np.log(np.exp(logits - peak).sum(1)) + peak[:, 0]
        return float(np.exp((normaliser - logits[np.arange(len(logits)), ids[1:]]).mean()))

    def close(self) -> None:
        """Free the model."""
        self._lib.llama_model_free(self._model)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        params = self._lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self._context
        context = self._lib.llama_init_from_model(self._model, params)
        try:
            yield context
        finally:
            self._lib.llama_free(context)

    def _decoded(self, context: Any, ids: Sequence[int], first: int) -> np.ndarray:
        batch = self._lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.logits[at] = token, first + at, 1, 1
            batch.seq_id[at][0] = 0
        code = self._lib.llama_decode(context, batch)
        self._lib.llama_batch_free(batch)
        assert code == 0, f"llama_decode returned {code}"
        rows = (self._lib.llama_get_logits_ith(context, at) for at in range(len(ids)))
        return np.stack([np.ctypeslib.as_array(row, (self.vocab_size,)).copy() for row in rows])
