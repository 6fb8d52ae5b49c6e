"""Tokenizers as others write them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


BEGIN, END, TURN = 256, 257, 258


def llama3(directory: Path, *, special=("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"), hole=0) -> Path:
    """A byte-level tokenizer that puts its first special token before every text, as Llama 3 does; an ordinary word may lie behind a hole."""
    directory.mkdir(exist_ok=True)
    inner = Tokenizer(models.BPE(vocab={**{letter: i for i, letter in enumerate(LETTERS)}, **({"</s>": 256 + hole} if hole else {})}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    if special:
        inner.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[(special[0], inner.token_to_id(special[0]))])
    inner.save(str(directory / "tokenizer.json"))
    return directory
