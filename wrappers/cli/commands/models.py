"""``nntask models``: the families of models, their presets, and the cost of a training step of each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ..options.help import parse

STATE_BYTES: Final = 16
"""Bytes per parameter in fp32: the weight, its gradient, and both moments of AdamW."""


@dataclass(frozen=True, slots=True)
class ModelsSettings:
    """List the families of models and their presets. With NAME, a preset, or a family: what a training step of it takes, or its presets."""

    json: bool = False
    """print JSON"""


def run(argv: Sequence[str]) -> int:
    """Print the models; returns 0.

    Raises:
        UsageError: there is no such model.
    """
    settings, words = parse(ModelsSettings, argv, "nntask models", optional=("NAME",))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from nntask import PRESETS

    name, listed = words[0] if words else "", families()
    if name not in PRESETS and (not name or name in listed):
        listed = {kind: facts for kind, facts in listed.items() if name in ("", kind)}
        print(json.dumps(listed, indent=1) if settings.json else "\n".join(_list(listed)))
        return 0
    figures = step_of(name)
    print(json.dumps(figures, indent=1) if settings.json else "\n".join(_lines(figures)))
    return 0


def families() -> dict[str, dict[str, Any]]:
    """Return for each model_type the classes of transformers, objectives, and presets with parameters and the bytes of their state."""
    from nntask.models import FAMILIES

    by_type = {}
    for kind, family in FAMILIES.items():
        presets = {
            name: {"parameters": preset.num_parameters, "state_bytes": STATE_BYTES * preset.num_parameters} for name, preset in family.presets.items()
        }
        by_type[kind] = {**_about(family.config), "presets": presets}
    return by_type


def _about(config: Any) -> dict[str, Any]:
    """Return the classes and objectives that a class of configs declares."""
    classes = [name for key in ("architecture", "classifier") if isinstance(name := getattr(config, key, None), str)]
    return {"classes": classes, "objectives": list(getattr(config, "objectives", ("causal",)))}


def step_of(name: str) -> dict[str, Any]:
    """Return the figures of a preset: its shape, and the cost of a step of one sequence in fp32 with AdamW, captured as in ``nntask plan``.

    Raises:
        UsageError: there is no such preset.
    """
    import difflib

    from nntask import PRESETS, UsageError
    from nntask.config import TrainSettings, devices_of, resolve
    from nntask.hardware import this_machine
    from nntask.models import FAMILIES
    from nntask.planning import capture, least_needs, no_collections

    if name not in PRESETS:
        near = difflib.get_close_matches(name, [*PRESETS, *FAMILIES], 1)
        raise UsageError(
            f"NAME must be a preset or a family, got {name!r}; " + (f"did you mean {near[0]}?" if near else "nntask models lists all of them")
        )
    config, asked = PRESETS[name], TrainSettings()
    asked = replace(asked, model=replace(asked.model, model=name), tiling=replace(asked.tiling, batch=1))
    takes_images = getattr(config, "image_size", None) is not None
    if takes_images:
        asked = replace(asked, data=replace(asked.data, dataset="images"))
    run = resolve(asked, config, machine=devices_of(asked.resources, asked.model.dtype, checks=False))
    with no_collections():
        captured = capture(run)
        needs = least_needs(captured.plan, this_machine(run.machine), run.step.recompute)
    return {
        "name": name,
        "model_type": config.model_type,
        **_about(FAMILIES[config.model_type].config),
        "parameters": config.num_parameters,
        "blocks": config.n_layer,
        "width": config.n_embd,
        "heads": config.n_head,
        "longest_sequence": config.longest,
        "vocabulary": config.vocab_size,
        "takes_images": takes_images,
        "state_bytes": STATE_BYTES * config.num_parameters,
        "persistent_bytes": needs.persistent,
        "least_bytes": needs.total,
        "least_bytes_with_disk": needs.task,
        "seq_len": run.model.seq_len,
        "tasks": len(captured.plan.tasks),
    }


def _list(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield families with their presets."""
    from nntask.io import format_size

    yield f"State: weight, gradient and both moments of AdamW in fp32, {STATE_BYTES} bytes a parameter; nntask models NAME plans a step."
    width = max((len(name) for facts in found.values() for name in facts["presets"]), default=0)
    for kind, facts in found.items():
        yield ""
        yield f"{kind}: {', '.join(facts['classes'])}; learns {', '.join(facts['objectives'])}"
        for name, figures in facts["presets"].items():
            yield f"  {name:{width}}  {figures['parameters']:>14,} parameters  {format_size(figures['state_bytes']):>10} of state"


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the figures of a preset as lines of text."""
    from nntask.io import format_least, format_size

    yield f"family              {figures['model_type']}: {', '.join(figures['classes'])}; learns {', '.join(figures['objectives'])}"
    yield f"parameters          {figures['parameters']:,}"
    blocks, longest = f"{figures['blocks']} blocks of width {figures['width']:,}", figures["longest_sequence"]
    if figures["takes_images"]:
        yield f"shape               {blocks}; {figures['vocabulary']:,} classes, images of {longest:,} patches"
    else:
        lengths = "any length" if longest is None else f"up to {longest:,}"
        yield f"shape               {blocks} with {figures['heads']} heads; {figures['vocabulary']:,} ids, sequences of {lengths}"
    yield f"kept between steps  {format_size(figures['persistent_bytes'])}: weights and both moments of AdamW, fp32"
    yield f"one sequence        of {figures['seq_len']:,} needs {format_least(figures['least_bytes'])} at least, {figures['tasks']:,} tasks"
    yield f"with --disk         {format_least(figures['least_bytes_with_disk'])} of memory at least"
