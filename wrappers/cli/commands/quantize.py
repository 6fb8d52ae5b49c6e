"""``nntask quantize``: a model in few bits, or in another element type, as a GGUF file or a directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..options.help import parse
from ..options.runtime_flags import open_source

if TYPE_CHECKING:
    from nntask.export import Converted

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class QuantizeSettings:
    """Write a model with its matrices in blocks of 8 or 4 bits, or all of it in another element type. MODEL is a run, one of its checkpoints, a model
    directory of transformers or a GGUF file. OUT is a GGUF file if its name ends with .gguf, and else a directory that nntask reads."""

    type: Literal["q8_0", "q4_0", "f16", "bf16", "f32"] = "q8_0"
    """of the matrices; q8_0 and q4_0 leave norms, biases, positions, the embedding and the head as they are"""
    embeddings: bool = False
    """quantise the token embedding too, and a head that is tied to it"""
    head: bool = False
    """quantise a head of its own too; one that is tied is the embedding"""
    keep: str = ""
    """tensors that stay as they are besides: names as MODEL's files have them, or patterns such as *.layers.0.*, with commas between"""
    ram: str = ""
    """most bytes of weights in memory at once, e.g. 64MiB (default: 32MiB or a row of the widest)"""
    tokenizer_path: str = ""
    """directory with tokenizer.json, for a model that came without one"""
    force: bool = False
    """replace OUT if it is a GGUF file or a model directory"""


def run(argv: Sequence[str]) -> int:
    """Write the file or the directory, and print sizes and the tensors that were left as they are; returns 0."""
    settings, words = parse(QuantizeSettings, argv, "nntask quantize", words=("MODEL", "OUT"))
    from nntask import UsageError
    from nntask.export import Conversion, Convertible, write_gguf, write_quantised
    from nntask.io import format_count, format_size, parse_size

    keep = tuple(each.strip() for each in settings.keep.split(",") if each.strip())
    for flag, value in {"--embeddings": settings.embeddings, "--head": settings.head}.items():
        if value and not settings.type.startswith("q"):
            raise UsageError(f"is about --type q8_0 and q4_0, and {settings.type} is for all matrices", "drop it", flag=flag)
    nbytes = parse_size(settings.ram, "--ram") if settings.ram else None
    source, target = open_source(words[0]), Path(words[1])
    has_tokenizer = source.has_tokenizer or bool(settings.tokenizer_path)
    tokenizer = source.tokenizer(settings.tokenizer_path) if has_tokenizer else None
    model = Convertible.of(source.path, source.config, source.checkpoint, tokenizer)
    if settings.head and model.config.names.head not in model.shapes():
        raise UsageError(
            f"is for a head with its own weights, and the head of {source.path} is the embedding", "use --embeddings, or drop it", flag="--head"
        )
    asked = Conversion(settings.type, settings.embeddings, settings.head, keep, nbytes)
    write = write_gguf if target.suffix == ".gguf" else write_quantised
    done = write(model, target, asked, force=settings.force)
    share = done.nbytes / done.before
    print(
        f"wrote {format_count(done.num_weights)} weights of {source.path} to {target}: "
        f"{format_size(done.nbytes)}, {share:.2f} of the {format_size(done.before)} before, {8 * done.nbytes / done.num_weights:.2f} bits a weight"
    )
    _print_stayed(done)
    if tokenizer is None:
        print("the model came without a tokenizer, so there is none; --tokenizer-path DIR adds it")
    return 0


def _print_stayed(done: Converted) -> None:
    for reason, names in done.stayed.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        print(f"stayed as it was: {', '.join(names[:_SHOWN])}{more} ({reason})")
    for note in done.notes:
        print(f"note: {note}")
