"""A captured step on the data of an engine is, task by task, the step that the engine would record."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from support.training import LLAMA
from support.transformers_oracle import CONFIGS, random_batch

from nntask.adapters.lora import LoRA, add_adapters
from nntask.engine.recorded import emit_training_step, named_data
from nntask.models.mlp_mixer import MlpMixerConfig
from nntask.models.registry import build
from nntask.nn.layers import Linear
from nntask.nn.module import Blocks
from nntask.optim.optimizers import SGD, AdamW, decay_groups
from nntask.tiling.model_tiling import ModelTiling
from scheduler import CapturingRuntime, Runtime, TaskRuntime
from scheduler.api.binding import Binding, bind
from scheduler.core.records import HandleRecord
from scheduler.core.step_plan import StepPlan
from tiles.block_format import BLOCK_FORMATS
from tiles.kernels import BF16, HollowGpu

MACHINES: Final[dict[str, dict[str, Any]]] = {
    "cpu": {"cpu_workers": 1},
    "devices": {"cpu_workers": 0, "sim_gpus": 2},
    "devices, updates in RAM": {"cpu_workers": 1, "sim_gpus": 1, "aside": True},
    "GPU": {"cpu_workers": 1, "gpus": 1},
    "GPU, updates in RAM": {"cpu_workers": 1, "gpus": 1, "aside": True},
}
"""Arguments of `Runtime`."""


class Options(NamedTuple):
    """How a model is trained."""

    dtype: Any = np.float32
    max_norm: float = 0.0
    lanes: int = 1
    minibatches: int = 2
    rank: int = 0
    blocks: str = ""
    dropout: float = 0.0
    optimizer: str = "adamw"
    library: bool = False
    flash: bool = True


OPTIONS: Final = {
    "plain": Options(),
    "clipped, lanes, dropout": Options(max_norm=1.0, lanes=2, minibatches=3, dropout=0.1),
    "bf16, stored scores": Options(dtype=BF16, flash=False, minibatches=1),
    "adapters": Options(rank=2, dropout=0.1),
    "momentum, library": Options(optimizer="sgd", library=True),
}
MIXER: Final = MlpMixerConfig(
    image_size=9, patch_size=3, num_channels=2, hidden_size=13, num_hidden_layers=2, tokens_mlp_dim=11, channels_mlp_dim=23, num_labels=5
)
FAMILIES: Final = {**CONFIGS, "mlp_mixer": MIXER}
WIDE: Final = replace(LLAMA, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
"""Whole blocks in each tile."""


class Emitted:
    """Model, optimizer and inputs on a runtime."""

    def __init__(self, runtime: TaskRuntime, config: Any, options: Options, *, on_cpu: bool) -> None:
        heads = 2 * config.n_head // config.n_kv_head
        tiling = ModelTiling(2, 6, 32, 32, heads, 40) if options.blocks else ModelTiling(5, 6, 24, 31, heads, 40)
        self.model = build(
            config.with_dropout(options.dropout), tiling, runtime, seed=3, dtype=np.dtype(options.dtype), flash=options.flash, library=options.library
        )
        if options.rank:
            self.model.freeze()
            add_adapters(self.model, LoRA(options.rank, 4.0, options.dropout), seed=3)
        if options.blocks:
            how = Blocks(BLOCK_FORMATS[options.blocks], is_turned=True)
            self.model.hold_blocks({f"{name}.weight": how for name, each in self.model.named_modules() if type(each) is Linear})
        groups, others = decay_groups(self.model, 0.1), {"max_norm": options.max_norm, "on_cpu": on_cpu}
        self.optimizer = SGD(groups, 0.1, momentum=0.9, **others) if options.optimizer == "sgd" else AdamW(groups, 0.1, **others)
        batch = {"images": np.zeros((5, 9)), "targets": np.zeros(5)} if config is MIXER else random_batch(config, 0)
        decoded, (size, length) = batch.get("decoder_tokens"), next(iter(batch.values())).shape
        names, target_len = tuple(batch), None if decoded is None else decoded.shape[1]
        self.inputs = [self.model.inputs(size, length, names, target_len) for _ in range(options.minibatches)]

    def emit(self) -> Any:
        """The results of the step."""
        return emit_training_step(self.model, self.optimizer, self.inputs)

    @property
    def data(self) -> dict[str, Binding]:
        """Data from before the step."""
        return named_data(self.model, self.optimizer, self.inputs)


def tasks_of(plan: StepPlan, bound: Mapping[HandleRecord, HandleRecord]) -> list[Any]:
    """Everything about the tasks of a plan; handles of the step are numbered, others are those of the program."""
    numbers = {record: number for number, record in enumerate(record for record in plan.uses if record in plan.owned)}

    first = next(task.label.minibatch for task in plan.tasks if task.label.minibatch >= 0)  # minibatches are counted on in a process

    def known(record: HandleRecord) -> Any:
        if record in numbers:
            spec = record.spec
            return numbers[record], spec.name, spec.nbytes, spec.view, spec.kind, spec.data_class, plan.owned[record]
        return bound.get(record, record)

    return [
        (
            task.codelet,
            task.name,
            task.kinds,
            [(known(record), mode) for record, mode in task.accesses],
            dict(task.constants),
            task.priority,
            task.label._replace(minibatch=max(task.label.minibatch - first, -1)),
            task.aside,
            task.pin,
            task.num_clones,
            task.clone_share,
            sorted(waits),
        )
        for task, waits in zip(plan.tasks, plan.predecessors, strict=True)
    ]


def check(config: Any, machine: str, options: Options) -> None:
    """Compare a captured step on the data of a model with the step that the model records; then adopt it."""
    given: dict[str, Any] = {"ram": 1 << 28, "lanes": options.lanes, "graphs": False, **MACHINES[machine]}
    if has_gpus := "gpus" in given:
        given |= {"gpus": [HollowGpu(1 << 30)], "gpu_memory": 1 << 28}
    aside = given.get("aside", False)
    dry = CapturingRuntime(options.lanes, has_gpus=has_gpus, aside=aside)
    symbolic = Emitted(dry, config, options, on_cpu=aside)
    with dry.record():
        results = symbolic.emit()
    with ExitStack() as stack:
        runtime = stack.enter_context(Runtime(**given))
        own = Emitted(runtime, config, options, on_cpu=aside)
        with runtime.record("submission") as step:
            outputs = own.emit()
        assert step.plan is not None
        bound = {record: handle.record for record, handle in bind(dry.plan, symbolic.data, own.data).items()}
        captured, recorded = tasks_of(dry.plan, bound), tasks_of(step.plan, {})
        for number, (ours, theirs) in enumerate(zip(captured, recorded, strict=True)):
            assert ours == theirs, number
        outliving = {record for record, outlives in dry.plan.owned.items() if outlives and record in dry.plan.uses}
        losses, squares = results
        assert outliving == {handle.record for tensor in (*losses, squares) for handle in tensor.handles}
        runtime.adopt(replace(step.order, plan=dry.plan), symbolic.data, own.data)
    assert len(captured) > 100
    del outputs


@pytest.mark.parametrize(
    ("name", "machine", "options"),
    [(name, machine, [*OPTIONS][(number + place) % len(OPTIONS)]) for place, machine in enumerate(MACHINES) for number, name in enumerate(FAMILIES)],
)
def test_a_captured_step_is_the_recorded_one(name: str, machine: str, options: str) -> None:
    """Every family on every machine and with all options, one for each machine: everything about every task."""
    check(FAMILIES[name], machine, OPTIONS[options])


@pytest.mark.parametrize("blocks", ["q8_0", "bf16"])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_captured_step_with_quantised_weights_is_the_recorded_one(machine: str, blocks: str) -> None:
    """The frozen weights in blocks are bound as they are stored."""
    check(WIDE, machine, Options(rank=2, blocks=blocks))
