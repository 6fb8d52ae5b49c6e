"""Weights of an open session, which are read and written rightly or not at all, and changes of the optimizer (C3, C8, P10)."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.eager_twin import Case, Cases, Program, Run, adamw, at, by_session, check, sgd
from support.small_modules import Net
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nntask import UsageError
from wrappers.torch import Session

CASES = Cases()
REFUSED = r"session|load_state_dict|state_dict"


def _net() -> Program:
    return Program(Net())


def _norm_of(module: nn.Module) -> float:
    return float(sum(weight.detach().square().sum() for weight in module.parameters()))


def _saved(run: Run) -> Any:
    """What `torch.save` of the weights gives back."""
    memory = io.BytesIO()
    torch.save(run.module.state_dict(), memory)
    return torch.load(io.BytesIO(memory.getvalue()), weights_only=True)


def _averaged(run: Run) -> Any:
    if run.number == 2:
        run.outer.average = AveragedModel(run.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    if run.number >= 2:
        run.outer.average.update_parameters(run.module)
        return list(run.outer.average.parameters())
    return None


READS: dict[str, Callable[[Run], Any]] = {
    "state_dict": lambda run: dict(run.module.state_dict()),
    "state_dict_of_a_part": lambda run: dict(run.module.b.state_dict()),
    "torch_save": _saved,
    "parameter": lambda run: float(run.module.a.weight.sum()),
    "data": lambda run: float(run.module.a.weight.data.sum()),
    "detach_numpy": lambda run: float(run.module.a.weight.detach().numpy().sum()),
    "norms_of_all": lambda run: _norm_of(run.module),
    "gradient": lambda run: None if run.module.a.weight.grad is None else run.module.a.weight.grad.clone(),
    "clip_grad_norm": lambda run: torch.nn.utils.clip_grad_norm_(run.module.parameters(), math.inf),
    "parameters_to_vector": lambda run: torch.nn.utils.parameters_to_vector(run.module.parameters()),
    "deepcopy": lambda run: list(copy.deepcopy(run.module).parameters()),
    "averaged_model": _averaged,
}
"""Ways to read weights or gradients from the module of a session."""


def _assign(run: Run) -> None:
    run.module.load_state_dict({name: torch.full_like(value, 0.1) for name, value in Net().double().state_dict().items()}, assign=True)


def _load(run: Run) -> None:
    run.module.load_state_dict({name: torch.full_like(value, 0.1) for name, value in Net().double().state_dict().items()})


def _clamp_and_assign(run: Run) -> None:
    for weight in run.module.parameters():
        weight.data = weight.data.clamp(-0.1, 0.1)


def _under_no_grad(change: Callable[[torch.Tensor], Any]) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        with torch.no_grad():
            for weight in run.module.parameters():
                change(weight)

    return act


WRITES: dict[str, Callable[[Run], None]] = {
    "load_state_dict": _load,
    "load_state_dict_assign": _assign,
    "data_assigned": _clamp_and_assign,
    "data_clamped": _under_no_grad(lambda weight: weight.data.clamp_(-0.1, 0.1)),
    "noise_added": _under_no_grad(lambda weight: weight.add_(0.01)),
    "constant_": _under_no_grad(lambda weight: nn.init.constant_(weight, 0.1)),
    "copy_": _under_no_grad(lambda weight: weight.copy_(torch.full(weight.shape, 0.1))),
    "vector_to_parameters": lambda run: torch.nn.utils.vector_to_parameters(torch.full((208,), 0.1, dtype=torch.float64), run.module.parameters()),
    "gradient_set": _under_no_grad(lambda weight: setattr(weight, "grad", torch.ones_like(weight))),
    "gradient_accumulated": lambda run: run.module(torch.ones(8, 12, dtype=torch.float64)).sum().backward(),
}
"""Ways to write weights or gradients to the module of a session; the loop of eager PyTorch clears gradients before it uses them."""


@pytest.mark.parametrize("way", READS)
def test_c3_reading_gives_values_or_is_refused(way: str) -> None:
    """Weights and gradients that the module is asked for are eager's, or the attempt is refused."""
    check(Case(_net, frozenset({"equal", "refused"}), REFUSED, before=[lambda run: run.note(READS[way](run)) if run.number else None]))


@pytest.mark.parametrize("way", WRITES)
def test_c3_writing_has_an_effect_or_is_refused(way: str) -> None:
    """Weights that are written through the module count, or the attempt is refused; later steps are eager's."""
    check(Case(_net, frozenset({"equal", "refused"}), REFUSED, before=[at(2, WRITES[way])]))


def test_c3_save_pretrained(tmp_path: Path) -> None:
    """`module.save_pretrained` of an open session writes its weights, or is refused."""
    hf = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    module = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes))
    ids = torch.arange(8)[None]
    with Session(module, "sgd", lr=0.1, ram="16MB", workers=1) as session:
        session.step(input_ids=ids, labels=ids)
        expected = session.state_dict()
        try:
            module.save_pretrained(tmp_path / "saved")
        except UsageError as error:
            assert "session" in str(error)  # noqa: PT017
            return
    found = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@CASES.add(before=[lambda run: run.write({name: value.clamp(-0.2, 0.2) for name, value in run.weights().items()})], optimizer=adamw)
def c3_clipping_by_the_documented_way() -> Program:
    """Weights clamped before each step; moments go on."""
    return _net()


@CASES.add(before=[at(3, lambda run: run.write({"b.weight": run.weights()["b.weight"] + 0.01}))], max_grad_norm=0.1, minibatches=2)
def c3_noise_by_the_documented_way() -> Program:
    """One weight of four is written."""
    return _net()


@CASES.add(before=[at(3, lambda run: run.write({"norm.running_mean": torch.full((4,), 0.5)}))])
def c3_buffer_by_the_documented_way() -> Program:
    """A buffer is written, of another type than it has."""
    module = Net()
    module.norm = nn.BatchNorm1d(4)
    module.register_forward_hook(lambda module, args, y: module.norm(y))
    return Program(module)


@CASES.add(before=[lambda run: run.write(dict(run.outer.teacher)) if run.number == 4 else run.outer.teacher.update(run.weights())])
def c3_going_back_by_the_documented_way() -> Program:
    """Weights of an earlier step are loaded again."""
    return Program(Net(), outer=SimpleNamespace(teacher={}))


@pytest.mark.parametrize(
    ("values", "words"),
    [({"b.wait": torch.zeros(4, 12)}, r"b\.wait"), ({"b.weight": torch.zeros(4, 11)}, r"b\.weight.*\(4, 11\)")],
    ids=["a name", "a shape"],
)
def test_c3_weights_that_cannot_be_loaded(values: dict[str, torch.Tensor], words: str) -> None:
    """An unknown name and another shape are refused with the name, and the weights stay."""
    module = Net()
    expected = copy.deepcopy(module.state_dict())
    with Session(module, "sgd", lr=0.1, loss=lambda y, batch: y.mean(), ram="16MB", workers=1) as session:
        with pytest.raises(UsageError, match=words):
            session.load_state_dict(values)
        assert all(torch.equal(expected[name], value) for name, value in session.state_dict().items())


def _keep_state(run: Run) -> None:
    """Keep the state of an optimizer that has taken a step over other weights of the same shapes."""
    twin = copy.deepcopy(run.module)
    optimizer = run.case.optimizer(twin)
    twin(torch.ones(8, 12, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    run.outer.first, run.outer.other = copy.deepcopy(run.optimizer.state_dict()), optimizer.state_dict()


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
BOTH = pytest.mark.parametrize("optimizer", OPTIMIZERS)
CHANGES: dict[str, Callable[[Run], Any]] = {
    "load_first_state": lambda run: run.optimizer.load_state_dict(run.outer.first),
    "load_other_state": lambda run: run.optimizer.load_state_dict(run.outer.other),
    "clear_state": lambda run: run.optimizer.state.clear(),
    "parameter_out_of_group": lambda run: run.optimizer.param_groups[0]["params"].pop(),
    "post_hook": lambda run: run.optimizer.register_step_post_hook(lambda *_: run.outer.calls.append(run.number)),
    "pre_hook": lambda run: run.optimizer.register_step_pre_hook(lambda *_: run.outer.calls.append(run.number)),
    "add_param_group": lambda run: run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))], "lr": 0.05}),
    "options": lambda run: run.optimizer.param_groups[0].update(eps=1e-2, momentum=0.5),
}
"""Changes of the optimizer while a session is open."""


@BOTH
@pytest.mark.parametrize("change", CHANGES)
def test_c8_changes_of_the_optimizer(change: str, optimizer: str) -> None:
    """A change has eager's effect, or is refused with words about the optimizer; hooks of steps are called."""
    words = r"param_group|group" if change == "add_param_group" else r"optimizer|group|param|state|hook"
    both = frozenset({"equal", "refused"})

    def build() -> Program:
        return Program(Net(), outer=SimpleNamespace(calls=[]))

    check(Case(build, both, words, optimizer=OPTIMIZERS[optimizer], setup=[_keep_state], before=[at(3, CHANGES[change])], ignore="first|other"))


def test_c8_a_group_that_is_added_is_not_blamed_on_momentum() -> None:
    """`add_param_group` is refused with words about groups, if it is."""
    case = Case(_net, optimizer=sgd, before=[at(1, CHANGES["add_param_group"])])
    try:
        by_session(case)
    except UsageError as error:
        assert "momentum" not in str(error)  # noqa: PT017


def _scheduled(make: Callable[[torch.optim.Optimizer], Any]) -> dict[str, Any]:
    """Terms of a case with a scheduler, which steps after each step but the last."""
    setup = lambda run: setattr(run.outer, "schedule", make(run.optimizer))  # noqa: E731
    return {"setup": [setup], "before": [lambda run: run.outer.schedule.step() if run.number else None], "steps": 8, "ignore": "schedule"}


@CASES.add(optimizer=adamw, **_scheduled(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=10)))
def p10_one_cycle_of_betas() -> Program:
    """`OneCycleLR` moves the first beta of AdamW."""
    return _net()


@CASES.add(optimizer=sgd, **_scheduled(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)))
def p10_one_cycle_of_momentum() -> Program:
    """`OneCycleLR` moves the momentum of SGD."""
    return _net()


@CASES.add(optimizer=sgd, **_scheduled(lambda optimizer: lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=3)))
def p10_cyclic() -> Program:
    """`CyclicLR` moves rate and momentum."""
    return _net()


def _decay(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["weight_decay"] = 0.1 * (1 + math.cos(math.pi * run.number / 6))


@CASES.add(optimizer=adamw, before=[_decay])
def p10_cosine_weight_decay() -> Program:
    """Weight decay that follows a cosine, AdamW."""
    return _net()


@CASES.add(optimizer=sgd, before=[_decay], minibatches=2, max_grad_norm=0.2)
def p10_cosine_weight_decay_of_sgd() -> Program:
    """The same of SGD."""
    return _net()


@pytest.mark.parametrize("case", CASES)
def test_changes_by_the_documented_ways_are_eagers(case: Case) -> None:
    """Losses, gradients and weights are those of eager PyTorch."""
    check(case)
