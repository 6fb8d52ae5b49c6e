"""The committed tile table beside a grid of hand choices, on four shapes of model and minibatch.

    python benchmarks/tile_table.py               # three rounds, writes benchmarks/results/tile_table.json
    python benchmarks/tile_table.py --shapes gpt2:1                  # this shape anew; rows of others whose grid is the same stay
    python benchmarks/tile_table.py --shapes gpt2:1 --rounds 1 --output=

A shape is a model and the sequences of its minibatch, ``gpt2:4``; sequences have the model's full length. The grid around the table's limits: tokens
per tile and vocabulary rows per tile at a half, once and twice the table's, with every combination; and features per tile no more than n_embd, so
that the feed-forward layer is cut.

The figure is seconds of a training step (fp32, AdamW, dropout 0) as ``--auto-tile measured`` finds them (`nntask.training.autotune.measure`): models
of more than two layers run with two, and the whole step's seconds follow from its kernels. Every side is a process of its own. Bar, for every shape:
in the table's tiles at most 1.05 x the seconds in the best of the grid.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any, Final

import common

SHAPES: Final = ("tiny:8", "gpt2:4", "gpt2:1", "gpt2-medium:2")
TABLE: Final = "table"
TOY: Final = {"vocab_size": 512, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 2}


def shape_of(text: str, tiny: bool) -> tuple[Any, int]:
    """Config and sequences of a shape such as ``gpt2:4``."""
    from nntask import PRESETS

    model, _, sequences = text.partition(":")
    config = replace(PRESETS[model], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return replace(config, **TOY) if tiny else config, int(sequences)


def grid(text: str, tiny: bool) -> dict[str, tuple[int, int, int]]:
    """Name of a side -> tokens, features and vocabulary rows per tile; one side for each different tiling."""
    from nntask.tiling import Limits, cut, table_limits

    config, sequences = shape_of(text, tiny)
    length = config.n_positions
    table = table_limits(config, sequences, length)
    choices = [Limits(int(table.tokens * t), table.features, int(table.vocab * v)) for t in (0.5, 1, 2) for v in (0.5, 1, 2)]
    choices.append(table._replace(features=config.n_embd))
    found = {cut(config, sequences, length, table): (TABLE, table)}
    for limits in choices:
        tiling = cut(config, sequences, length, limits)
        found.setdefault(tiling, (", ".join(f"{name.removesuffix('_tile')} {getattr(tiling, name)}" for name in tiling.__slots__), limits))
    return dict(found.values())


def measure(text: str, tiny: bool, limits: tuple[int, int, int], workers: int) -> dict[str, float]:
    """Seconds of a step in the tiles that follow from `limits`."""
    from nntask.config import ModelSettings, ResourceSettings, TilingSettings, TrainSettings, resolve
    from nntask.tiling import Limits, cut
    from nntask.training import measure as seconds_of

    config, sequences = shape_of(text, tiny)
    model = ModelSettings(model=text.partition(":")[0], seq_len=config.n_positions)
    asked = TrainSettings(model=model, tiling=TilingSettings(batch=sequences), resources=ResourceSettings(ncpu=workers))
    seconds, _ = seconds_of(resolve(asked, config), cut(config, sequences, config.n_positions, Limits(*limits)))
    return {"seconds": seconds}


def comparison(text: str, found: dict[str, common.Measurement]) -> dict[str, Any]:
    """The table beside the best hand choice of one shape."""
    seconds = {name: each["seconds"] for name, each in found.items()}
    table = seconds.pop(TABLE)
    best = min(seconds, key=lambda name: seconds[name])
    model, _, sequences = text.partition(":")
    what, peer = f"{model}, {sequences} sequences: a step in the table's tiles", f"best of {len(seconds)} hand choices ({best})"
    return common.compare(what, "s", table, peer, seconds[best], better="less", bar="ratio <= 1.05")


def main() -> None:
    parser = common.parser(__doc__, "tile_table")
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="MODEL:SEQUENCES")
    parser.add_argument("--workers", type=int, default=common.usable_cores(), help="CPU workers")
    parser.add_argument("--tiny", action="store_true", help="a toy model of each name, to try the script itself")
    parser.add_argument("--limits", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.limits:
        common.report(measure(options.shapes[0], options.tiny, tuple(options.limits), options.workers))
        return
    machine = common.machine()
    file = common.RESULTS / f"{options.output}.json"
    before = json.loads(file.read_text()) if options.output and file.exists() and not options.tiny else {"rounds": {}}
    rounds: dict[str, Any] = {text: sides for text, sides in before["rounds"].items() if sides.keys() == grid(text, options.tiny).keys()}
    measured = {text: when for text, when in before.get("measured", {}).items() if text in rounds}
    for text in options.shapes:
        sides = []
        for name, limits in grid(text, options.tiny).items():
            again = ["--shapes", text, "--limits", *map(str, limits), f"--workers={options.workers}", *["--tiny"] * options.tiny]
            sides.append(common.Side(name, common.this_script(__file__, *again), common.one_thread_blas()))
        rounds[text] = common.alternate(sides, options.rounds)
        measured[text] = {"date": common.datetime.date.today().isoformat(), "commit": common.commit(), "rounds": options.rounds}
    middle = {text: {name: common.medians(found) for name, found in sides.items()} for text, sides in rounds.items()}
    common.finish(
        options.output,
        machine,
        ("nntask", "numpy"),
        {"rounds": options.rounds, "shapes": list(rounds), "workers": options.workers},
        [comparison(text, sides) for text, sides in middle.items()],
        keep=not options.tiny,
        measured=measured,
        medians=middle,
        rounds=rounds,
    )


if __name__ == "__main__":
    main()
