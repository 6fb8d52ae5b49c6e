"""Adapters beside frozen weights: PEFT's losses, no trace of gradients for what is frozen, the same bits whatever runs the tasks."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from support import gpt2_oracle, llama_oracle
from support.peft_oracle import losses_of_both
from support.training import GPT, LENGTH, LLAMA, MODELS, TILINGS, VOCAB, Job, build

from nntask import no_grad
from nntask.adapters.lora import LoRA, adapted, add_adapters, largest_rank
from nntask.errors import DataError, UsageError
from nntask.hf.model_directory import ModelDirectory
from nntask.io.safetensors_file import fingerprint_of, save_tensors
from nntask.models.blocks import ForwardPass
from nntask.models.gpt2 import GPT2, GPT2Config
from nntask.models.mixtures import OlmoeConfig, Qwen2MoeConfig
from nntask.nn.autograd import Tensor, checkpoint
from nntask.nn.functional import Masks
from nntask.nn.initializers import constant
from nntask.nn.module import Parameter
from nntask.optim.optimizers import SGD
from nntask.tiling.model_tiling import ModelTiling
from scheduler import InlineRuntime, Runtime, TaskRuntime, Trace
from scheduler.api.capturing_runtime import CapturingRuntime
from scheduler.planning import BLOCK, NONE, as_asked
from wrappers.torch.interchange import to_torch

PAGE = 4096
FAMILIES = {"gpt2": gpt2_oracle, "llama": llama_oracle}
TILING = ModelTiling(minibatch_tile=2, seq_tile=9, embd_tile=17, inner_tile=23, vocab_tile=50)
STEPS = 3
CUT = TILINGS["gpt2"]


class Copies(Trace):
    """How often each piece of data went from one node to another."""

    def __init__(self) -> None:
        super().__init__()
        self.names: defaultdict[tuple[int, int], Counter[str]] = defaultdict(Counter)

    def add_copy(self, source: int, target: int, name: str, *rest: int) -> None:
        """Bytes moved."""
        self.names[source, target][name] += 1


def with_adapters(runtime: TaskRuntime, family: str = "gpt2", **options):
    """A model from a seed, with adapters."""
    return build(runtime, f"{family} adapters", **options)


def job(runtime: TaskRuntime, family: str = "gpt2", **options) -> Job:
    """It trains."""
    return Job(runtime, f"{family} adapters", **options)


@cache
def truth(family: str) -> list[bytes]:
    """What running every task at once, in order, gives."""
    return job(InlineRuntime(), family).run(STEPS)


@cache
def plan(family: str, recompute: bool = False):
    """The step in submission order."""
    runtime = CapturingRuntime(1)
    found = job(runtime, family)
    with runtime.record():
        found.outputs = found.emit()
    return as_asked(runtime.plan, BLOCK if recompute else NONE), found.model


def pages(tensors) -> int:
    """Bytes that the ledger counts for the tiles of tensors."""
    return sum(-(-handle.spec.nbytes // PAGE) * PAGE for tensor in tensors for handle in tensor.handles)


@pytest.mark.parametrize("family", [name if name == "gpt2" else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES])
def test_losses_are_pefts(family: str) -> None:
    """20 steps of AdamW with decay and clipping, from the same first values: within 1e-4 of PEFT on torch. The second family is long; adapters of
    other families beside PEFT's are in wrappers/cli/test_cli_families."""
    oracle = FAMILIES[family]
    config = oracle.random_config(5)
    theirs = oracle.hf_model(config)
    model = oracle.our_model(theirs, config, TILING, InlineRuntime())
    add_adapters(model, LoRA(3, 6.0), seed=1)
    losses = losses_of_both(model, theirs, gpt2_oracle.batches(config, 20, 3, config.n_positions), 1e-2)
    assert max(abs(ours - his) for ours, his in losses) < 1e-4
    assert losses[-1][1] < losses[0][1] - 0.05  # it learnt, so the comparison says something


@pytest.mark.parametrize("family", MODELS)
def test_gradients_with_dropout_are_the_slopes(family: str) -> None:
    """In fp64: the change of the loss along a random direction of every factor is what the gradients say, with a fixed mask."""
    runtime = InlineRuntime()
    model = with_adapters(runtime, family, dtype=np.float64, lora=LoRA(3, 5.0, 0.3))
    tokens, targets = model.input_tensors(2)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, VOCAB, (2, LENGTH + 1)).astype(np.int32)
    tokens.write(ids[:, :-1])
    targets.write(ids[:, 1:])
    values = {name: rng.standard_normal(t.shape) * 0.2 for name, t in model.trained_tensors().items()}
    direction = {name: rng.standard_normal(value.shape) for name, value in values.items()}

    def loss(at: float) -> Tensor:
        for name, tensor in model.trained_tensors().items():
            tensor.write(values[name] + at * direction[name])
        return model(tokens, targets)

    loss(0.0).backward()
    gradients = {name: parameter.gradient.read() for name, parameter in model.named_parameters().items() if parameter.trainable}
    slope = sum(float((gradient * direction[name]).sum()) for name, gradient in gradients.items())
    with no_grad():
        measured = (loss(1e-6).read()[0] - loss(-1e-6).read()[0]) / 2e-6
    assert abs(slope) > 0.01
    assert measured == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_no_task_writes_or_differentiates_what_is_frozen(family: str, recompute: bool) -> None:
    """Frozen tiles are read only, gradients and state are the adapters' alone, and below the first adapter nothing goes back."""
    found, model = plan(family, recompute)
    frozen = {handle.spec.name for tensor in model.frozen_tensors().values() for handle in tensor.handles}
    modes = {(handle.spec.name in frozen, mode) for task in found.tasks for handle, mode in task.accesses if handle.spec.data_class == "parameters"}
    assert {mode for is_frozen, mode in modes if is_frozen} == {"R"}
    assert "RW" in {mode for is_frozen, mode in modes if not is_frozen}
    sizes: Counter[str] = Counter()
    for handle in found.uses:
        sizes[handle.spec.data_class] += handle.spec.size
    trained = pages(model.trained_tensors().values())
    assert sizes["gradients"] == trained
    assert sizes["optimizer"] == 2 * trained
    names = Counter(task.name for task in found.tasks)
    assert not {"embedding_backward", "add_rows_backward", "column_sums"} & set(names)
    # the first norm's input leads to nothing that is learnt: of 2 L + 1 norms, all but one have a backward pass
    backward = names["norm_backward_apply"]  # one for each tile of 2 positions x 2 features, in two minibatches
    assert backward == 2 * 4 * (2 * 2 + 1 - 1)


def test_the_ledger_counts_the_adapters_share() -> None:
    """Bytes by class at the peak of a real run: optimizer state is two moments of the adapters, gradients at most theirs of two steps in flight."""
    with Runtime(2, ram=1 << 26) as runtime:
        learning = job(runtime)
        learning.run(2)
        peak = runtime.stats()["peak_bytes_by_class"]["ram"]
    trained = pages(learning.model.trained_tensors().values())
    assert peak["optimizer"] == 2 * trained
    assert peak.get("gradients", 0) <= 2 * trained
    assert trained < pages(learning.model.frozen_tensors().values())


def test_frozen_tiles_go_to_the_tier_at_most_once(tmp_path: Path) -> None:
    """Weights that the seed made leave a short memory once, however often they come back; what is learnt goes out again and again."""
    found, _ = plan("gpt2")
    trace = Copies()
    with Runtime(1, ram=found.needed_bytes() // 3, disk=tmp_path, trace=trace) as runtime:
        learning = job(runtime)
        assert learning.run(STEPS) == truth("gpt2")
        frozen = {handle.spec.name for tensor in learning.model.frozen_tensors().values() for handle in tensor.handles}
    out, back = trace.names[0, 1], trace.names[1, 0]
    assert max(out[name] for name in frozen) == 1
    assert max(back[name] for name in frozen) > 1
    assert max(out.values()) > 1


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.long), "llama"])
def test_frozen_tiles_of_a_directory_never_go_to_the_tier(family: str, tmp_path: Path) -> None:
    """They are read again from its files: not a byte of them is written, although memory is short and the rest goes out and comes back."""
    config = MODELS[family][1]
    FAMILIES[family].hf_model(config).save_pretrained(tmp_path / "base")
    directory, trace = ModelDirectory.open(tmp_path / "base"), Copies()
    want = job(InlineRuntime(), family, start=directory, seed=None).run(STEPS)
    with Runtime(1, ram=plan(family)[0].needed_bytes() // 3, disk=tmp_path / "tier", trace=trace) as runtime:
        found = job(runtime, family, start=directory, seed=None)
        assert found.run(STEPS) == want
        frozen = {handle.spec.name for tensor in found.model.frozen_tensors().values() for handle in tensor.handles}
    assert not frozen & set(trace.names[0, 1])
    assert sum(trace.names[0, 1].values()) > 0
    assert max(sum(copies[name] for copies in trace.names.values()) for name in frozen) > 1


def test_more_matrices_than_there_are_places_for_dropout() -> None:
    """Masks would be those of another matrix; a place that there is none of is refused, too."""
    deep = GPT2(GPT2Config(vocab_size=4, n_positions=1, n_embd=2, n_layer=513, n_head=1), ModelTiling(), CapturingRuntime(1), seed=None)
    with pytest.raises(UsageError, match=r"2048 matrices at most, and the model has 2052; set its dropout to 0"):
        add_adapters(deep, LoRA(1, 1.0, 0.1))
    add_adapters(deep, LoRA(1, 1.0))
    with pytest.raises(UsageError, match=r"dropout sites must be numbers from 0 to 4095, got 4096"):
        Masks(deep.dropout_key).stream(4096)


@pytest.mark.parametrize("family", MODELS)
def test_losses_are_the_same_bits_recomputed(family: str) -> None:
    """--recompute block, of which the first block too is recomputed although nothing below it is learnt."""
    with Runtime(cpu_workers=1) as runtime:
        assert job(runtime, family, recompute=BLOCK).run(STEPS) == truth(family)
    kept, _ = plan(family)
    recomputed, _ = plan(family, True)
    assert Counter(task.name for task in recomputed.tasks)["attention"] == 2 * Counter(task.name for task in kept.tasks)["attention"]
    assert recomputed.needed_bytes() < kept.needed_bytes()
    assert len(set(truth(family))) == STEPS


def test_first_values_do_not_depend_on_tiles() -> None:
    """A within its bound and drawn by position, B zero: the model scores as before."""
    whole, cut = (with_adapters(InlineRuntime(), tiling=tiling).trained_tensors() for tiling in (ModelTiling(), CUT))
    assert set(whole) == set(cut)
    for name, tensor in whole.items():
        values = tensor.read()
        assert np.array_equal(values, cut[name].read())
        if name.endswith("A"):
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < np.abs(values).max() <= bound
        else:
            assert not values.any()
    plain, adapted_model = GPT2(GPT, CUT, InlineRuntime(), seed=3), with_adapters(InlineRuntime())
    ids = np.arange(2 * LENGTH, dtype=np.int32).reshape(2, LENGTH)
    scores = []
    for model in (plain, adapted_model):
        model.eval()
        tokens, _ = model.input_tensors(2)
        tokens.write(ids)
        with no_grad():
            scores.append(model.logits(tokens).read())
    assert np.array_equal(*scores)


def test_what_is_one_matrix_in_the_files_has_one_adapter() -> None:
    """GPT-2's q, k and v share A, like the columns of c_attn; LLaMA's are matrices of their own."""
    groups = adapted(with_adapters(InlineRuntime()))
    assert list(groups["transformer.h.1.attn.c_attn"]) == ["h.1.attn.q", "h.1.attn.k", "h.1.attn.v"]
    q, k, v = groups["transformer.h.1.attn.c_attn"].values()
    assert q.lora.A is k.lora.A is v.lora.A
    assert len({id(layer.lora.B) for layer in (q, k, v)}) == 3
    assert all(len(layers) == 1 for layers in adapted(with_adapters(InlineRuntime(), "llama")).values())


@pytest.mark.parametrize("family", MODELS)
def test_a_module_of_torch_has_them_merged(family: str) -> None:
    """`to_torch` of a model in memory scores as the model with its adapters does."""
    runtime = InlineRuntime()
    model = with_adapters(runtime, family)
    rng = np.random.default_rng(2)
    for tensor in model.trained_tensors().values():
        tensor.write(rng.standard_normal(tensor.shape).astype(np.float32) * 0.3)
    ids = rng.integers(0, VOCAB, (2, LENGTH)).astype(np.int32)
    tokens, _ = model.input_tensors(2)
    tokens.write(ids)
    model.eval()
    with no_grad(), torch.no_grad():
        ours = model.logits(tokens).read()
        theirs = to_torch(model)(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(ours).max()


def test_bf16_keeps_frozen_weights_as_stored() -> None:
    """Masters and moments in fp32 are the adapters' alone, and frozen weights have the bits they had."""
    runtime = InlineRuntime()
    learning = job(runtime, dtype=ml_dtypes.bfloat16)
    before = {name: tensor.read().tobytes() for name, tensor in learning.model.frozen_tensors().items()}
    learnt = {name: tensor.read().tobytes() for name, tensor in learning.model.trained_tensors().items()}
    learning.run(STEPS)
    assert {name: tensor.read().tobytes() for name, tensor in learning.model.frozen_tensors().items()} == before
    assert all(tensor.read().tobytes() != learnt[name] for name, tensor in learning.model.trained_tensors().items())
    state = learning.optimizer.tensors()
    assert {name.partition(".")[2] for name in state} == set(learnt)
    assert {name.partition(".")[0] for name in state} == {"master", "m", "v"}
    assert {tensor.dtype for tensor in state.values()} == {np.dtype(np.float32)}


def test_recomputing_a_block_in_which_nothing_is_learnt_leaves_no_tape() -> None:
    """A checkpoint over frozen weights from a frozen input is only computed."""
    model = GPT2(GPT, CUT, InlineRuntime(), seed=1)
    model.freeze()
    tokens, _ = model.input_tensors(1)
    tokens.write(np.zeros((1, LENGTH), np.int32))
    assert checkpoint(lambda x: model.stack.blocks[0](x, ForwardPass(None, {}), None), model.embed(tokens)).edge is None
    with pytest.raises(UsageError, match="and all 36 are frozen"):
        SGD(model.parameters(), 0.1)
    early = Parameter((3,), (-1,), constant(1.0))
    early.freeze()
    early.allocate(model.runtime, "early", np.float32, 0)
    assert early.edge is None


def test_refusals() -> None:
    """Numbers out of range, a rank above the smallest width, adapters twice."""
    for numbers in ((0, 8.0, 0.0), (8, 0.0, 0.0), (8, float("inf"), 0.0), (8, 8.0, 1.0)):
        with pytest.raises(UsageError, match="rank must be at least 1"):
            LoRA(*numbers)
    model = GPT2(GPT, CUT, InlineRuntime(), seed=1)
    assert largest_rank(GPT) == largest_rank(LLAMA) == 24
    sizes = (61, 48, 8, 2, 4, 32)  # experts are 8 wide inside, which no adapter sees
    assert largest_rank(OlmoeConfig.of_size(*sizes)) == 48
    assert largest_rank(Qwen2MoeConfig.of_size(*sizes, intermediate_size=16, shared_expert_intermediate_size=20)) == 20
    with pytest.raises(UsageError, match="at most 24, the smallest width of a matrix that it adapts, got 25"):
        add_adapters(model, LoRA(25, 1.0))
    add_adapters(model, LoRA(2, 1.0))
    with pytest.raises(UsageError, match="can have only one set of adapters"):
        add_adapters(model, LoRA(2, 1.0))


def test_fingerprints_see_other_weights(tmp_path: Path) -> None:
    """Names, shapes, types and the values at the ends and in the middle of each tensor; equal files have equal ones."""
    model = GPT2(GPT, CUT, InlineRuntime(), seed=1)
    tensors = model.tensors()
    save_tensors(tmp_path / "a", tensors)
    save_tensors(tmp_path / "b", tensors)
    assert fingerprint_of(tmp_path / "a") == fingerprint_of(tmp_path / "b")
    found = {fingerprint_of(tmp_path / "a")}
    save_tensors(tmp_path / "c", {"x" if name == "ln_f.bias" else name: tensor for name, tensor in tensors.items()})
    save_tensors(tmp_path / "d", tensors, dtype=np.dtype(np.float16))
    tensors["h.1.mlp.c_proj.weight"].write(tensors["h.1.mlp.c_proj.weight"].read() * 1.001)
    save_tensors(tmp_path / "e", tensors)
    found |= {fingerprint_of(tmp_path / name) for name in "cde"}
    assert len(found) == 4
    with pytest.raises(DataError, match="cannot read"):
        fingerprint_of(tmp_path / "none")
