"""Whether a machine has the memory for what a trained model is to do: ``nntask generate`` and ``nntask perplexity`` refuse at once what would end
halfway.

What counts is a step, as `planning.memory_fit` counts a training step: of scoring, each is the same; of texts, the last of the longest, with the
whole cache. Prompts pass through the model before that and may need more; the runtime refuses them when it meets them.

A refusal names every budget that is too small with what it must be at least, and those flags for smaller work whose least value would do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scheduler import CapturingRuntime
from tiles import TileTensor

from ..config.units import flag_size
from ..errors import DoesNotFit
from ..hardware.machine_model import RAM, MachineModel, this_machine
from ..hardware.machine_spec import MachineSpec, check_budgets
from ..nn.autograd import no_grad
from ..planning.memory_fit import needs_of, no_collections, untouched
from ..planning.needs import Needs, shortage
from ..tiling.model_tiling import default_tiling
from .encoded import attended

if TYPE_CHECKING:
    from ..models.language import LanguageModel
    from ..tiling.model_tiling import ModelTiling
    from .pretrained import ModelSource


def check_memory(
    source: ModelSource, tiling: ModelTiling, dtype: str, machine: MachineSpec, *, batch: int, length: int, prompt_length: int, num_beams: int = 1
) -> None:
    """Check that texts can be written to their ends; takes no memory, and 0.3 s for gpt2-large.

    Args:
        dtype: see `ModelSource.build`.
        batch: texts at a time.
        length: tokens of the longest, in the cache.
        prompt_length: tokens of the longest prompt, which are what the cache has with a single new token; of an encoder, what that reads.
        num_beams: of each text.

    Raises:
        DoesNotFit: a budget is too small; says by how much.
    """

    def emit(model: LanguageModel, runtime: CapturingRuntime, batch: int, length: int, num_beams: int) -> TileTensor:
        cache = model.cache(batch, length, num_beams)
        tokens, positions = cache.inputs(1)
        last = cache.last_position // cache.tile
        first = 0 if batch > 1 and cache.has_windows else last  # a text that has ended early keeps what it sees
        sources = cache.sources() if num_beams > 1 else None
        if model.start is not None:
            cache.attend_across(attended(model, [[0] * prompt_length] * batch, num_beams))
        with runtime.record(), no_grad():
            return model.continued_logits(tokens, cache.past(positions, range(first, last + 1), sources)).data

    def needs(batch: int, length: int, num_beams: int) -> Needs:
        return needs_of_step(source, tiling, dtype, machine, lambda model, runtime: emit(model, runtime, batch, length, num_beams))

    size: tuple[int, ...] = (batch, length, num_beams)
    smaller: dict[str, tuple[int, ...]] = {
        "--max-new-tokens": (batch, 1 if source.config.description.encoder else prompt_length, num_beams),
        "--batch": (1, length, num_beams),
        "--num-beams": (batch, length, 1),
    }
    beams = f"{num_beams} beams x " if num_beams > 1 else ""
    _check(machine, needs, size, f"{batch} x {beams}{length} tokens", smaller)


def check_scoring(source: ModelSource, dtype: str, machine: MachineSpec, *, batch: int, length: int) -> None:
    """Check that a text can be scored; takes no memory, and 0.3 s for gpt2-large.

    Args:
        dtype: see `ModelSource.build`.
        batch: windows at once.
        length: tokens of each.

    Raises:
        DoesNotFit: a budget is too small; says by how much.
    """

    def emit(model: LanguageModel, runtime: CapturingRuntime, batch: int, length: int) -> TileTensor:
        given: Mapping[str, Any] = model.inputs(batch, length)
        model.eval()
        with runtime.record(), no_grad():
            return model(**given, reduction="sum").data

    def needs(batch: int, length: int) -> Needs:
        tiling = default_tiling(source.config, batch, length, device=machine.gpus.device_class)
        return needs_of_step(source, tiling, dtype, machine, lambda model, runtime: emit(model, runtime, batch, length))

    _check(machine, needs, (batch, length), f"{batch} x {length} tokens", {"--batch": (1, length), "--seq-len": (batch, 1)})


def needs_of_step(
    source: ModelSource,
    tiling: ModelTiling,
    dtype: str,
    machine: MachineSpec,
    emit: Callable[[LanguageModel, CapturingRuntime], TileTensor | None],
    *,
    data: Sequence[TileTensor] = (),
    kept: int = 0,
) -> Needs:
    """What a model and a recorded step of it need; `emit` records the step and returns its output, if it has one.

    Args:
        data: what there is besides the model, of which the step may touch a part; `emit` may add to it.
        kept: bytes that other steps keep.
    """
    with no_collections():
        runtime = CapturingRuntime(has_gpus=machine.has_gpus)
        model = source.build(runtime, tiling, dtype, read=False)
        emit(model, runtime)
        runtime.plan.idle = untouched(runtime.plan, [*model.tensors().values(), *data]) + kept
        return needs_of(runtime.plan, reading=runtime.reading_nbytes)


def _check(machine: MachineSpec, needs: Callable[..., Needs], size: tuple[int, ...], said: str, smaller: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a machine has what work needs.

    Args:
        size: of the work, as `needs` takes it.
        said: the size as a message says it.
        smaller: flags, each with the size where it has its least value.

    Raises:
        DoesNotFit: it has not, or its budgets are not to be had.
    """
    check_budgets(machine)
    target, found = this_machine(machine), needs(*size)
    if found.fit(target):
        return
    flags = " or ".join(flag for flag, less in smaller.items() if less != size and needs(*less).fit(target))
    more = what_to_raise(target, found, machine)
    raise DoesNotFit(f"{said}: {shortage(target, found)}; {f'lower {flags}, or ' if flags else ''}{more}")


def what_to_raise(target: MachineModel, needs: Needs, machine: MachineSpec) -> str:
    """What to raise, all of it; or the disk tier that would hold what host memory cannot, and what must be raised beside it."""
    found = _raised(target, needs.short(target), machine)
    if target.storage or all(at != target.last for at, _ in needs.short(target)):
        return found
    with_disk = target.with_empty_disk()
    besides = [each for each in needs.short(with_disk) if each[0] != with_disk.last]
    return f"{found}, or {f'{_raised(with_disk, besides, machine)} and ' if besides else ''}add --disk DIR"


def _raised(target: MachineModel, short: Sequence[tuple[int, int]], machine: MachineSpec) -> str:
    """What to raise to have so many bytes of some nodes of a machine."""
    changes = []
    devices = max((nbytes for at, nbytes in short if target.nodes[at][0] != RAM and at != target.last), default=0)  # one size for all of them
    for at, nbytes in short:
        size = flag_size(nbytes if target.nodes[at][0] == RAM or at == target.last else devices)
        if machine.disk is not None and target.storage and at == target.last:
            where = "" if machine.disk.budget.is_given else ", where as much is free"
            changes.append(f"SIZE in --disk DIR:SIZE (now {machine.disk.budget.text}) to at least {size}{where}")
        else:
            flag, budget = ("--ram", machine.ram) if target.nodes[at][0] == RAM else ("--gpu-memory", machine.device)
            changes.append(f"{flag} (now {budget.text or 'the default'}) to at least {size}")
    return f"raise {' and '.join(dict.fromkeys(changes))}"
