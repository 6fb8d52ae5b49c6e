"""Whether a machine has room for texts that are to be written: ``nntask generate`` refuses at once what would end within a text.

What counts is the last step of the longest text, with the whole cache, as `fitting` counts a training step. Prompts pass through the model before
that and may need more; the runtime refuses them when it meets them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from scheduler.capture import CapturingRuntime

from ..autograd import no_grad
from ..cache import KVCache
from ..errors import DoesNotFit
from .fitting import needs_of, no_collections, shortage, shown_size, untouched
from .gpus import gpus_of
from .places import RAM, this_machine
from .settings import MachineSettings, ResourceSettings, TrainSettings

if TYPE_CHECKING:
    from ..tiling import ModelTiling
    from .source import ModelSource


def check_room(source: ModelSource, tiling: ModelTiling, dtype: str, machine: MachineSettings, *, batch: int, length: int) -> None:
    """Check that texts can be written to their ends; takes no memory, and 0.3 s for gpt2-large.

    Args:
        dtype: see `ModelSource.build`.
        batch: texts at a time.
        length: tokens of the longest, in the cache.

    Raises:
        DoesNotFit: a budget is too small; says by how much.
    """
    settings = TrainSettings(resources=ResourceSettings(**asdict(machine)))
    target = this_machine(settings)
    with no_collections():
        runtime = CapturingRuntime(has_gpus=bool(gpus_of(settings)[0].parts))
        model = source.build(runtime, tiling, dtype, read=False)
        cache = KVCache(model.config, model.given_tiling, runtime, batch, length, model.lm_head.dtype)
        tokens, positions = cache.inputs(1)
        last = cache.last_position // cache.tile
        with runtime.record(), no_grad():
            output = model.continued_logits(tokens, cache.past(positions, range(last, last + 1)))
        del output
        runtime.plan.idle = untouched(runtime.plan, model.tensors().values())
        needs = needs_of(runtime.plan, reading=runtime.reading_nbytes)
    if needs.fit(target):
        return
    fewer = "--max-new-tokens" if batch == 1 else "--max-new-tokens or --batch"
    more = f"raise --ram (now {machine.ram or 'the default'})" + ("" if target.storage else ", or add --disk DIR")
    if not needs.fits_task(target):
        name, _ = max((target.nodes[place] for place in target.places), key=lambda node: node[1])
        flag, now = ("--ram", machine.ram) if name == RAM else ("--gpu-memory", machine.gpu_memory)
        fewer = "" if batch == 1 else "--batch"
        more = f"raise {flag} (now {now or 'the default'}) to at least {shown_size(needs.minimum(target)[name])}"
    elif target.storage and needs.last(target) > target.nodes[target.last][1]:
        more = f"raise SIZE in --disk DIR:SIZE (now {machine.disk})"
    raise DoesNotFit(f"{batch} x {length} tokens: {shortage(target, needs)}; {f'lower {fewer}, or ' if fewer else ''}{more}")
