"""Cases of the sweep by library, and the trial of each.

A case is named ``library/name``. Listing imports no model; a trial is made where it runs.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

from trial import STEPS, Trial

SKIPPED: Final = ("Encodec", "VibeVoice", "Blt")
"""Beginnings of classes that no rule makes tiny."""


def cases() -> list[str]:
    """Names of all cases that the installed libraries have: of each library, one class of each configuration first."""
    import libraries
    import peft_models
    import vision_models

    libraries.prepare()
    found = [f"transformers/{name}" for name in transformers_classes()]
    if importlib.util.find_spec("peft"):
        found += [f"peft/{name}" for name in peft_models.peft_cases()]
    if importlib.util.find_spec("torchvision"):
        found += [f"torchvision/{name}" for name in vision_models.torchvision_cases()]
    if importlib.util.find_spec("timm"):
        found += [f"timm/{name}" for name in vision_models.TIMM]
    return found


def transformers_classes() -> Iterator[str]:
    """Classes of transformers' automatic models: the first of each kind of model, then the second, and so on."""
    from transformers.models.auto import modeling_auto

    by_type: dict[str, list[str]] = {}
    tables = [table for name, table in sorted(vars(modeling_auto).items()) if name.startswith("MODEL_FOR_") and name.endswith("_NAMES")]
    seen = set[str]()
    for table in [*tables, modeling_auto.MODEL_MAPPING_NAMES]:
        for model_type, value in table.items():
            for name in (value,) if isinstance(value, str) else value:
                if name not in seen:
                    seen.add(name)
                    by_type.setdefault(model_type, []).append(name)
    most = max(map(len, by_type.values()))
    for place in range(most):
        for model_type in sorted(by_type):
            names = by_type[model_type]
            if place < len(names):
                yield names[(place + len(model_type)) % len(names)]


def trial_of(case: str) -> Trial:
    """The trial of a case.

    Raises:
        Exception: whatever a library raises for a module that cannot be made, or that takes none of the inputs.
    """
    import peft_models
    import vision_models

    library, _, name = case.partition("/")
    makers: dict[str, Callable[[str], Trial]] = {
        "transformers": of_transformers,
        "peft": peft_models.of_peft,
        "torchvision": vision_models.of_torchvision,
        "timm": vision_models.of_timm,
    }
    return makers[library](name)


def of_transformers(name: str) -> Trial:
    """A tiny model of a class of transformers, with batches that it takes."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers
    from hf_configs import tiny
    from hf_inputs import Shapes, accepted, batch_of, projected
    from trial import MOST_PARAMETERS, made

    if name.startswith(SKIPPED):
        raise ValueError("no rule makes its configuration tiny")
    model_class: Any = getattr(transformers, name)
    given: dict[str, Any] = {}
    if name.endswith(("ForCausalLM", "LMHeadModel", "ModelWithLMHead")) and getattr(model_class.config_class(), "is_decoder", None) is False:
        given["is_decoder"] = True

    def make() -> Any:
        return model_class(tiny(model_class.config_class, **given))

    with torch.device("meta"):
        size = sum(each.numel() for each in make().parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"not tiny: {size:,} parameters")
    module = made(Trial(make, ()))
    shapes = Shapes(module.config, name)
    plan, about = accepted(module, shapes)
    batches = [batch_of(plan, shapes, number) for number in range(STEPS)]
    return Trial(make, batches, None if plan[1] else projected, about if plan[1] else f"{about}; a loss of the sweep")
