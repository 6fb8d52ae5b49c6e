"""Keys and values of an encoder's output for a decoder: computed once, attended to by every new token, and kept for each row of a text.

Letters: B rows, w new tokens, S positions of the source, H heads of queries, G heads of keys and values, each D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiles import TileTensor
from tiles.ops import attention as attention_ops
from tiles.ops import cache as cache_ops

from .autograd import Tensor


@dataclass(frozen=True, slots=True)
class EncoderPast:
    """Keys and values of the source in one layer of a decoder; attention to them leaves no tape.

    Args:
        keys, values: (B, S, G*D).
        documents: int32 document numbers of new tokens (B, w) and of the source (B, S); padding of the source has a number of its own.
    """

    keys: TileTensor
    values: TileTensor
    documents: tuple[TileTensor, TileTensor]

    def attend(self, q: Tensor, *, head_size: int, scale: float) -> Tensor:
        """Attend from q (B, w, H*D) to the source without its padding -> (B, w, H*D)."""
        scoring = attention_ops.Scoring(documents=self.documents)
        return Tensor(attention_ops.attention(q.data, self.keys, self.values, head_size=head_size, scale=scale, causal=False, scoring=scoring)[0])


def kept(x: TileTensor, num_beams: int = 1) -> TileTensor:
    """Copy keys or values x (texts, S, G*D) for all later tokens, with `num_beams` neighbouring rows of one tile for each text."""
    texts, _, _ = x.shape
    tile = x.tile[0] * num_beams
    rows = TileTensor(x.runtime, (texts * num_beams,), (tile,), np.int32, kind="input", data_class="data", name="sources")
    rows.write(np.repeat(np.arange(texts, dtype=np.int32), num_beams))
    shape = (texts * num_beams, *x.shape[1:])
    out = TileTensor(x.runtime, shape, (tile, *x.tile[1:]), x.dtype, kind="persistent", data_class="activations", name=f"kept {x.name}")
    cache_ops.gather_rows(x, rows, out, range(x.grid[1]))
    return out


def source_documents(keys: TileTensor, is_text: npt.NDArray[np.integer], num_tokens: int = 1) -> tuple[TileTensor, TileTensor]:
    """Return the documents of an `EncoderPast` over `keys` (B, S, G*D) for `num_tokens` new tokens.

    Args:
        is_text: (texts, S), 1 where the source has text and 0 in its padding; each text has B / texts rows.
    """
    numbers = np.repeat(is_text, keys.shape[0] // len(is_text), axis=0).astype(np.int32)
    documents = []
    for values, tile in ((np.ones((len(numbers), num_tokens), np.int32), num_tokens), (numbers, keys.tile[1])):
        tensor = TileTensor(keys.runtime, values.shape, (keys.tile[0], tile), np.int32, kind="input", data_class="data", name="documents")
        tensor.write(values)
        documents.append(tensor)
    return documents[0], documents[1]
