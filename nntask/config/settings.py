"""All settings of a training run, as plain data: one field per flag of ``nntask train``, in groups.

A field's name with dashes is its flag; the text under it is its help. An unset value is None, and `resolution.resolve` fills it in. `LOCKED` lists
the groups that a resumed run must share with the run it continues; the others may differ.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, TypeVar

from ..errors import DataError

T = TypeVar("T")

Period = int  # in steps; 0 means never
StorageDtype = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What is trained."""

    model: str | None = None
    """preset, which nntask models lists, such as gpt2, llama-1b, bert-base (default tiny)"""
    config_path: str | None = None
    """config of a family that nntask models lists, a JSON file with Hugging Face keys; instead of --model"""
    seq_len: int | None = None
    """tokens per sequence, at most n_positions (default n_positions, at most 4096)"""
    dtype: Literal["auto", "fp32", "tf32", "bf16", "fp64"] = "auto"
    """arithmetic; auto is fp32, tf32 rounds factors of products on GPUs, fp32 on a CPU, bf16 stores bf16, keeps fp32 masters and sums in fp32"""
    fp32_fast_tf32: bool = False
    """older name of --dtype tf32"""
    dropout: float | None = None
    """probability for all dropouts of the config (default: the config's)"""
    flashattention: bool = True
    """attention without the full score matrix; --no-flashattention stores the scores"""
    gpu_attention: Literal["own", "cudnn", "auto"] = "own"
    """who computes attention on GPUs: nntask's kernels, or cuDNN where it can, which is bf16 in tiles of whole sequences; rounds otherwise. auto
    times both when a run begins, which then keeps the faster one"""


@dataclass(frozen=True, slots=True)
class TilingSettings:
    """How the batch and the tensors are cut. In tile flags -1 means the whole dimension."""

    batch: int | None = None
    """sequences per optimizer step (default 8 for tiny and llama-tiny, else 1)"""
    minibatch: int = -1
    """sequences in flight at once, divides --batch; gradients accumulate (-1: the batch)"""
    minibatch_tile: int | None = None
    """sequences per tile, divides the minibatch"""
    seq_tile: int | None = None
    """tokens per tile"""
    embd_tile: int | None = None
    """features per tile"""
    inner_tile: int | None = None
    """features of the feed-forward layer per tile"""
    head_tile: int | None = None
    """heads of queries per tile; of those that share keys and values, all or none"""
    vocab_tile: int | None = None
    """rows of the embedding and of the head per tile"""
    auto_tile: Literal["table", "measured"] = "table"
    """where sizes that are not given come from: the table, or a search that runs steps of the model in different tiles and takes the fastest"""
    tile_table: str = ""
    """TOML file of tilings for single shapes, stronger than the built-in table; --auto-tile measured writes what it finds there"""
    redux: bool = False
    """sum gradients in 4 parallel lanes instead of one chain; same as --lanes 4"""
    lanes: int | None = None
    """parallel lanes of gradient sums; changes rounding, like a tile size (default 1)"""


@dataclass(frozen=True, slots=True)
class DataSettings:
    """What it learns from."""

    dataset: str = "stdlib"
    """stdlib (this machine's Python library), text (--dataset-path: file or directory, also parquet), WikiText-103, train.bin, jsonl, images"""
    dataset_path: str = ""
    """file, directory or pattern of files of the dataset; WikiText-103 is fetched to it if it is not there"""
    val_path: str = ""
    """validation text or tokens (default: held-out texts, or val.bin beside train.bin)"""
    dataset_select: int = -1
    """use the first N texts (rows of WikiText-103, sequences of train.bin); -1 for all"""
    tokenizer: str = "auto"
    """bpe (trained on the text, as many ids as the model's vocabulary), bytes, or a name on the Hub; auto: bpe where installed"""
    tokenizer_path: str = ""
    """directory with tokenizer.json; a tokenizer with a name is fetched to it if it is not there"""
    objective: Literal["causal", "masked", "seq2seq", "classify"] | None = None
    """what is learnt: the next token, masked tokens, an output from an input, a label (default: the config's)"""
    mask_probability: float = 0.15
    """share of tokens that are predicted, of masked, and of seq2seq on plain texts, whose spans are hidden"""
    target_len: int | None = None
    """tokens of an output of seq2seq (default: of pairs --seq-len; of hidden spans what they take)"""
    document_boundaries: bool = False
    """texts in one sequence do not see each other; conversations share sequences"""
    chat_template: str = ""
    """Jinja file that writes conversations (JSON lines with messages) as text (default: the tokenizer's)"""
    seed: int = 0
    """of weights, shuffling, dropout, masks and sampling"""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """How it learns."""

    train: str = "all"
    """all weights, or lora:RANK: the model stays as it is, and adapters of that rank beside its matrices learn (Hu et al., 2021)"""
    lora_alpha: float | None = None
    """what adapters add is scaled by this over their rank (default: the rank)"""
    lora_dropout: float = 0.0
    """probability of dropping an element on its way into an adapter"""
    optimizer: Literal["fusedadamw", "adamw", "adam", "sgd"] = "fusedadamw"
    """fusedadamw is another name of adamw"""
    lr: float | None = None
    """peak learning rate (default 1e-3 for tiny and llama-tiny, else 3e-4)"""
    weight_decay: float = 0.0
    """decay of matrices; vectors are never decayed"""
    optimizer_eps: float = 1e-8
    """epsilon of Adam"""
    beta1: float = 0.9
    """decay of Adam's first moment"""
    beta2: float = 0.95
    """decay of Adam's second moment"""
    momentum: float = 0.0
    """of sgd"""
    grad_clip: float = 0.0
    """largest norm of the whole gradient; 0 is off"""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """learning rate after the warm-up; wsd: constant, then down over the last fifth"""
    warmup_steps: int | None = None
    """steps of linear warm-up (default 10, or 0 with --full-lr-iter)"""
    min_lr: float = 0.0
    """learning rate at the end of linear, cosine and wsd"""
    start_lr: float = 0.0
    """learning rate of step 1 under --full-lr-iter"""
    full_lr_iter: int = 1
    """step from which --lr holds, rising linearly from --start-lr"""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """of the printed loss, over the tokens of a step; gradients are always those of the mean"""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How long, and what besides."""

    steps: int | None = None
    """optimizer steps; overrides epochs (default 200 when neither epochs nor timing loops are asked for)"""
    nepochs: int = 0
    """passes over the data"""
    nepochs_warmup: int = 0
    """passes before those, which train too but are not timed"""
    eval_every: Period = 0
    """validate every N steps and at the end; 0 means never"""
    eval_batches: int = 8
    """batches per validation"""
    sample_tokens: int = 64
    """tokens of text sampled at the end, fewer when it is as long as a sequence; 0 for none"""
    prompt: str = ""
    """beginning of that text"""
    nforward: int = 0
    """timed forward passes over a minibatch of random tokens, before training"""
    nforward_warmup: int = 0
    """forward passes before those, not timed"""
    nbackward: int = 0
    """timed forward and backward passes; the backward part is reported"""
    nbackward_warmup: int = 0
    """backward passes before those, not timed"""
    check_finite: bool = False
    """look for NaN after every task and name the first task and tile that made one"""
    dry_run: bool = False
    """check everything, print the resolved configuration, train nothing and write nothing"""


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """What is kept."""

    run_dir: str = ""
    """directory of the run (default runs/<time>-<model>)"""
    resume: str = ""
    """continue a run exactly: its directory, one of its checkpoints, or auto (the run in --run-dir, else the newest in runs/)"""
    save_every: Period | None = None
    """checkpoint every N steps and at the end; 0 means never (default: only at the end)"""
    keep_checkpoints: int = 3
    """how many checkpoints to keep"""
    init_from: str = ""
    """start from the model in this directory, as transformers writes it, or GGUF file; instead of --model. Others go through PyTorch"""
    load_checkpoint: str = ""
    """start from these weights (safetensors)"""
    save_checkpoint: str = ""
    """write the weights here at the end (safetensors)"""
    save_checkpoint_dtype: StorageDtype = "fp32"
    """element type of --save-checkpoint"""
    load_optimizer: str = ""
    """start from this optimizer state (safetensors)"""
    save_optimizer: str = ""
    """write the optimizer state here at the end (safetensors)"""
    save_optimizer_dtype: StorageDtype = "fp32"
    """element type of --save-optimizer"""


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """Where it runs. Between CPU and GPUs numbers differ by rounding; nothing else here changes one."""

    ncpu: int | None = None
    """CPU workers (default: the cores this process may use, none where GPUs are used)"""
    ngpu: int | None = None
    """GPUs, the first ones that CUDA shows (default: all, where CuPy is installed); what has a CUDA kernel runs there only"""
    split_gpu: int = 1
    """parts that each GPU is used as: devices with memory, kernels and copies of their own on one card"""
    graphs: bool = True
    """on GPUs, run tasks of a step that fits its memory fused, whole passes at a time, as CUDA graphs; --no-graphs starts every kernel by itself"""
    sim_gpu: int = 0
    """simulated devices: more workers, each with a memory of its own"""
    gpu_memory: str = ""
    """budget of each GPU or simulated device, e.g. 1GiB, or of GPUs a share, e.g. 0.25 (default: 0.9 of what is free; simulated: as RAM)"""
    sim_bandwidth: str = ""
    """bytes per second of each link of a simulated device, e.g. 8GB/s (default: as fast as memory copies)"""
    ram: str = ""
    """byte budget of RAM, e.g. 2GiB (default 0.9 of what is free); below what the model needs, --disk takes the rest"""
    disk: str = ""
    """DIR or DIR:SIZE, a disk tier below RAM: one file in DIR of at most SIZE bytes (default: what is free there), gone at the end"""
    sched: Literal["auto", "eager", "prio", "lws", "dm", "dmda", "dmdas", "reuse"] = "auto"
    """scheduling policy"""
    evict: Literal["next-use", "lru", "fifo"] = "next-use"
    """what leaves a full memory first"""
    prefetch: bool = True
    """move tiles before they are asked for"""


@dataclass(frozen=True, slots=True)
class ResourceSettings(MachineSettings):
    """Where it runs. Between CPU and GPUs losses differ by rounding; nothing else here changes one."""

    order: str = "auto"
    """in which order a step is executed when memory is short: auto, submission, eager-update, layers, layers:G, turn:K/8 or forward"""
    recompute: str = "auto"
    """what the backward pass computes again instead of reading it: auto where memory is short, none, block for all but the inputs of blocks, or names
    of operations, such as layer_norm,attention"""
    update_on: Literal["device", "cpu", "auto"] = "device"
    """where weights are updated on a machine with devices: device, where they compute; cpu, by CPU workers in RAM, where the optimizer's state then
    stays, which rounds otherwise than GPUs; auto, where the step is forecast to be faster"""
    strict: bool = False
    """refuse to run what has no CUDA kernel on the CPU while there are GPUs"""
    restrict: Literal["none", "cpu", "cuda"] = "none"
    """where kernels may run: cpu leaves GPUs out, cuda insists on one; with GPUs, only what has no CUDA kernel runs on the CPU"""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """On which machines it runs. Nothing here changes a loss."""

    dask: str = ""
    """train on a Dask cluster: the scheduler's address, or local:N for N workers on this machine; needs --lanes"""
    nodes: int | None = None
    """Dask workers to wait for, and to use (default: those that are there, at most one a lane)"""
    link_bandwidth: str = ""
    """bytes per second that each Dask worker sends to others at most, e.g. 100MB (default: as fast as the network)"""
    transport: Literal["dask", "nccl"] = "dask"
    """what carries gradients and parameters between nodes: Dask's connections, or NCCL from GPU to GPU, unencrypted and not yet measured"""


@dataclass(frozen=True, slots=True)
class ObserveSettings:
    """What is recorded."""

    trace: str = ""
    """write a Chrome trace here, gzip when the name ends in .gz (default with --trace-steps: trace.json.gz in the run's directory)"""
    trace_steps: str = ""
    """A:B, trace only steps A to B, both included (default all); nntask report draws them"""
    report_to: Literal["none", "tensorboard"] = "none"
    """tensorboard: write what metrics.jsonl says of each step for TensorBoard, too, into the folder tensorboard of the run"""
    explain: str = ""
    """a task's name or a part of it: print what each worker would have cost for its first three placements, and who took it"""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Train a model of a family here, or with --init-from another language model of transformers. Without flags: a small one on Python's library."""

    model: ModelSettings = field(default_factory=ModelSettings)
    tiling: TilingSettings = field(default_factory=TilingSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    run: RunSettings = field(default_factory=RunSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    resources: ResourceSettings = field(default_factory=ResourceSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    observe: ObserveSettings = field(default_factory=ObserveSettings)


LOCKED: Final = ("model", "tiling", "data", "optimizer")


_NAMES: Final = ("model", "config_path", "dataset_path", "val_path", "tokenizer_path", "chat_template")
"""Where things are; what they are is compared apart, by the model's config and the fingerprint of the data."""


def known(value: T | None) -> T:
    """A value that `nntask.config.resolution.filled` has answered."""
    assert value is not None
    return value


def differences(stored: TrainSettings, now: TrainSettings) -> list[str]:
    """Flags of the locked groups whose values differ, as "--flag (was, is)"; both settings resolved. Names of models and places do not count."""
    found = []
    for group in LOCKED:
        before, after = getattr(stored, group), getattr(now, group)
        for f in fields(before):
            was, value = getattr(before, f.name), getattr(after, f.name)
            if was != value and f.name not in _NAMES:
                found.append(f"--{f.name.replace('_', '-')} (was {was}, is {value})")
    return found


def from_dict(values: Mapping[str, Mapping[str, Any]], source: str) -> TrainSettings:
    """Settings from the nested dict that `dataclasses.asdict` makes of them; unknown entries are left out.

    Args:
        source: the file they come from, for messages.

    Raises:
        DataError: a value is of another type than its flag.
    """
    groups = {}
    for f in fields(TrainSettings):
        group: Any = f.default_factory
        kinds = typing.get_type_hints(group)
        known = {key: value for key, value in values.get(f.name, {}).items() if key in kinds}
        for key, value in known.items():
            if not _is_of(value, kinds[key]):
                raise DataError(f"settings.{f.name}.{key} in {source} must be {_words_for(kinds[key])}, got {value!r}; use another checkpoint")
        groups[f.name] = group(**known)
    return TrainSettings(**groups)


def _is_of(value: object, kind: Any) -> bool:
    """Whether a value from JSON is of a field's type; whole numbers are numbers, booleans are not."""
    if _is_union(kind):
        return any(_is_of(value, each) for each in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    return type(value) is kind or (kind is float and type(value) is int)


def _is_union(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union  # the latter of a Literal


def _words_for(kind: Any) -> str:
    if _is_union(kind):
        return " or ".join(map(_words_for, typing.get_args(kind)))
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(typing.get_args(kind))}"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}.get(kind, "null")
