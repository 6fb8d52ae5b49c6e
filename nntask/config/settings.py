"""All settings of a training run, as plain data: one field per flag of ``nntask train``, in groups.

The name of a field with dashes is its flag, and the text under it is the flag's help. An unset value is None, and `resolution.resolve` fills it in.
`LOCKED` lists the groups that a resumed run must share with the run it continues; the others may differ.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, TypeVar

from ..errors import DataError

T = TypeVar("T")

Period = int  # number of steps; 0 means never
StorageDtype = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The model."""

    model: str | None = None
    """built-in model; nntask models lists all, such as gpt2, llama-1b, bert-base (default: tiny)"""
    config_path: str | None = None
    """config of a model as a JSON file with Hugging Face keys, instead of --model; nntask models lists the supported families"""
    seq_len: int | None = None
    """number of tokens per sequence, at most n_positions of the config (default: n_positions, at most 4096)"""
    dtype: Literal["auto", "fp32", "tf32", "bf16", "fp64"] = "auto"
    """arithmetic: fp32 (also auto), tf32 (fp32 with TF32 products on GPUs), bf16 (bf16 values, fp32 masters and sums), or fp64"""
    fp32_fast_tf32: bool = False
    """old name of --dtype tf32"""
    dropout: float | None = None
    """probability of all dropouts in the model (default: the config's)"""
    flashattention: bool = True
    """compute attention without storing the full score matrix; --no-flashattention stores the scores"""
    gpu_attention: Literal["own", "cudnn", "auto"] = "own"
    """attention on GPUs: own kernels, cuDNN (for bf16 in tiles of whole sequences; other rounding), or auto, which times both and keeps the faster"""


@dataclass(frozen=True, slots=True)
class TilingSettings:
    """Division of the batch and of tensors into tiles. In tile flags, -1 means the whole dimension."""

    batch: int | None = None
    """number of sequences per optimizer step (default: 8 for tiny and llama-tiny, else 1)"""
    minibatch: int = -1
    """number of sequences in flight at once, a divisor of --batch; gradients accumulate (-1: the whole batch)"""
    minibatch_tile: int | None = None
    """number of sequences per tile, a divisor of the minibatch"""
    seq_tile: int | None = None
    """number of tokens per tile"""
    embd_tile: int | None = None
    """number of features per tile"""
    inner_tile: int | None = None
    """number of features of the feed-forward layer per tile"""
    head_tile: int | None = None
    """number of query heads per tile; heads that share a key/value head must be in the same tile"""
    vocab_tile: int | None = None
    """number of rows of the embedding and of the head per tile"""
    auto_tile: Literal["table", "measured"] = "table"
    """source of tile sizes that are not given: a table, or measured for a search that times steps of the model in different tiles"""
    tile_table: str = ""
    """TOML file of tile sizes for single model shapes, which overrides the built-in table; --auto-tile measured writes its result there"""
    redux: bool = False
    """sum gradients in 4 parallel lanes instead of one chain, like --lanes 4"""
    lanes: int | None = None
    """number of parallel partial sums of gradients; changes rounding, like a tile size (default: 1)"""


@dataclass(frozen=True, slots=True)
class DataSettings:
    """The training data."""

    dataset: str = "stdlib"
    """training data: stdlib (this machine's Python library), text (any files, also parquet), WikiText-103, train.bin, jsonl, or images"""
    dataset_path: str = ""
    """file, directory or pattern of files of the dataset; a missing WikiText-103 is downloaded to it"""
    val_path: str = ""
    """validation text or tokens (default: held-out texts, or val.bin in the directory of train.bin)"""
    dataset_select: int = -1
    """number of texts to use, from the first (rows of WikiText-103, sequences of train.bin); -1 for all"""
    tokenizer: str = "auto"
    """bpe (trained on the text, with the model's vocabulary size), bytes, or a name on the Hub; auto is bpe if installed"""
    tokenizer_path: str = ""
    """directory with tokenizer.json; a missing tokenizer from the Hub is downloaded to it"""
    objective: Literal["causal", "masked", "seq2seq", "classify"] | None = None
    """training objective: causal (next token), masked (masked tokens), seq2seq (output from input), or classify (default: the config's)"""
    mask_probability: float = 0.15
    """share of tokens to predict for --objective masked, and to hide in spans for seq2seq on plain texts"""
    target_len: int | None = None
    """number of tokens of an output for --objective seq2seq (default: --seq-len for pairs, as needed for hidden spans)"""
    document_boundaries: bool = False
    """keep texts in one sequence from attending to each other, and put several conversations into one sequence"""
    chat_template: str = ""
    """Jinja template file that turns conversations (JSON lines with messages) into text (default: the tokenizer's)"""
    seed: int = 0
    """seed of initial weights, shuffling, dropout, masks and sampling"""


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """The trained weights and the optimizer."""

    train: str = "all"
    """weights to train: all, or lora:RANK for LoRA adapters of that rank on frozen weights (Hu et al., 2021)"""
    lora_alpha: float | None = None
    """factor of adapters, which add lora_alpha / RANK times their product (default: the rank)"""
    lora_dropout: float = 0.0
    """dropout probability of the inputs of adapters"""
    optimizer: Literal["fusedadamw", "adamw", "adam", "sgd"] = "fusedadamw"
    """optimizer; fusedadamw is another name of adamw"""
    lr: float | None = None
    """peak learning rate (default: 1e-3 for tiny and llama-tiny, else 3e-4)"""
    weight_decay: float = 0.0
    """weight decay of matrices; vectors have none"""
    optimizer_eps: float = 1e-8
    """epsilon of Adam"""
    beta1: float = 0.9
    """decay of Adam's first moment"""
    beta2: float = 0.95
    """decay of Adam's second moment"""
    momentum: float = 0.0
    """momentum of --optimizer sgd"""
    grad_clip: float = 0.0
    """largest norm of the whole gradient, which is scaled down to it; 0 is off"""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """learning rate schedule after the warm-up; wsd is constant, then decays over the last fifth"""
    warmup_steps: int | None = None
    """number of steps of linear warm-up (default: 10, or 0 with --full-lr-iter)"""
    min_lr: float = 0.0
    """learning rate at the end of --schedule linear, cosine or wsd"""
    start_lr: float = 0.0
    """learning rate of step 1 with --full-lr-iter"""
    full_lr_iter: int = 1
    """step at which a linear warm-up from --start-lr reaches --lr"""
    loss_reduction: Literal["mean", "sum"] = "mean"
    """reduction of the printed loss over the tokens of a step; gradients are always those of the mean"""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Length of the run, validation and sampling."""

    steps: int | None = None
    """number of optimizer steps; overrides --nepochs (default: 200 without --nepochs and timing loops)"""
    nepochs: int = 0
    """number of passes over the data"""
    nepochs_warmup: int = 0
    """number of passes before --nepochs that train but are not timed"""
    eval_every: Period = 0
    """validate every N steps and at the end; 0 means never"""
    eval_batches: int = 8
    """number of batches per validation"""
    sample_tokens: int = 64
    """number of tokens of text to sample at the end, at most those that fit a sequence; 0 for none"""
    prompt: str = ""
    """beginning of the sampled text"""
    nforward: int = 0
    """number of timed forward passes over a minibatch of random tokens, before training"""
    nforward_warmup: int = 0
    """number of forward passes before the timed ones"""
    nbackward: int = 0
    """number of timed forward and backward passes; the backward part is reported"""
    nbackward_warmup: int = 0
    """number of backward passes before the timed ones"""
    check_finite: bool = False
    """check for NaN after every task, and name the first task and tile that has one"""
    dry_run: bool = False
    """check all settings and print the resolved configuration, without training or writing anything"""


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Checkpoints and initial weights."""

    run_dir: str = ""
    """directory of the run (default: runs/<time>-<model>)"""
    resume: str = ""
    """continue a run exactly: its directory, one of its checkpoints, or auto (the run in --run-dir, else the newest in runs/)"""
    save_every: Period | None = None
    """save a checkpoint every N steps and at the end; 0 means never (default: only at the end)"""
    keep_checkpoints: int = 3
    """number of newest checkpoints to keep"""
    init_from: str = ""
    """model directory of transformers or GGUF file to start from, instead of --model; models of other families run through PyTorch"""
    load_checkpoint: str = ""
    """safetensors file of weights to start from"""
    save_checkpoint: str = ""
    """safetensors file to write the weights to at the end"""
    save_checkpoint_dtype: StorageDtype = "fp32"
    """element type of --save-checkpoint"""
    load_optimizer: str = ""
    """safetensors file of optimizer state to start from"""
    save_optimizer: str = ""
    """safetensors file to write the optimizer state to at the end"""
    save_optimizer_dtype: StorageDtype = "fp32"
    """element type of --save-optimizer"""


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """The machine. Numbers differ by rounding between CPU and GPUs; no other setting here changes them."""

    ncpu: int | None = None
    """number of CPU workers (default: one per core that this process may use, or 0 if GPUs are used)"""
    ngpu: int | None = None
    """number of GPUs, the first ones that CUDA lists (default: all if CuPy is installed); they run all tasks that have a CUDA kernel"""
    split_gpu: int = 1
    """number of devices that each GPU is divided into, with memory, kernels and copies of their own"""
    graphs: bool = True
    """run the tasks of a step that fits the GPU's memory fused, as CUDA graphs; --no-graphs starts every kernel on its own"""
    sim_gpu: int = 0
    """number of simulated devices: further CPU workers, each with a memory of its own"""
    gpu_memory: str = ""
    """memory budget of each GPU or simulated device, e.g. 1GiB, or a share of a GPU, e.g. 0.25 (default: 0.9 of its free memory, or --ram)"""
    sim_bandwidth: str = ""
    """bytes per second of each link of a simulated device, e.g. 8GB/s (default: the speed of memory copies)"""
    ram: str = ""
    """memory budget in RAM, e.g. 2GiB (default: 0.9 of the free memory); a model that needs more also needs --disk"""
    disk: str = ""
    """disk tier below RAM, DIR or DIR:SIZE: a temporary file in DIR of at most SIZE bytes (default: the free space)"""
    sched: Literal["auto", "eager", "prio", "lws", "dm", "dmda", "dmdas", "reuse"] = "auto"
    """scheduling policy of tasks"""
    evict: Literal["next-use", "lru", "fifo"] = "next-use"
    """eviction policy of a full memory"""
    prefetch: bool = True
    """move tiles to a memory before tasks need them there"""


@dataclass(frozen=True, slots=True)
class ResourceSettings(MachineSettings):
    """The machine. Losses differ by rounding between CPU and GPUs; no other setting here changes them."""

    order: str = "auto"
    """order in which a step is executed if memory is short: auto, submission, eager-update, layers, layers:G, turn:K/8 or forward"""
    recompute: str = "auto"
    """values to recompute in the backward pass: auto (if memory is short), none, block (all but inputs of blocks), or operations, e.g. layer_norm"""
    update_on: Literal["device", "cpu", "auto"] = "device"
    """workers that update weights: device, cpu (CPU workers, optimizer state in RAM, other rounding than on GPUs), or auto for the faster forecast"""
    strict: bool = False
    """refuse tasks without a CUDA kernel on a machine with GPUs, instead of running them on the CPU"""
    restrict: Literal["none", "cpu", "cuda"] = "none"
    """devices that kernels may use: cpu uses no GPU, cuda needs one, and tasks without a CUDA kernel still run on the CPU"""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The cluster. No setting here changes a loss."""

    dask: str = ""
    """train on a Dask cluster: the address of its scheduler, or local:N for N workers on this machine; needs --lanes"""
    nodes: int | None = None
    """number of Dask workers to wait for and to use (default: those that have joined, at most one per lane)"""
    link_bandwidth: str = ""
    """largest number of bytes per second that each Dask worker sends to others, e.g. 100MB (default: no limit)"""
    transport: Literal["dask", "nccl"] = "dask"
    """connections for gradients and parameters between nodes: Dask's, or NCCL from GPU to GPU, which is unencrypted and not yet measured"""


@dataclass(frozen=True, slots=True)
class ObserveSettings:
    """Traces and reports."""

    trace: str = ""
    """write a Chrome trace to this file, compressed if its name ends in .gz (default with --trace-steps: trace.json.gz in the run's directory)"""
    trace_steps: str = ""
    """A:B, trace only steps A to B, both included (default: all); nntask report draws them"""
    report_to: Literal["none", "tensorboard"] = "none"
    """tensorboard also writes the figures of each step in metrics.jsonl as TensorBoard events to the folder tensorboard of the run"""
    explain: str = ""
    """name of a task, or a part of it: print the cost of its first three placements on each worker, and the chosen worker"""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Train a built-in model or, with --init-from, a language model of transformers. Without flags: a small one on the code of Python's library."""

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
"""Names and places, which may differ; their contents are compared by the model's config and the fingerprint of the data."""


def known(value: T | None) -> T:
    """Return a value that `nntask.config.resolution.filled` has set."""
    assert value is not None
    return value


def differences(stored: TrainSettings, now: TrainSettings) -> list[str]:
    """Return flags of the locked groups whose values differ, as "--flag (was, is)", for resolved settings. Names of models and paths do not count."""
    found = []
    for group in LOCKED:
        before, after = getattr(stored, group), getattr(now, group)
        for f in fields(before):
            was, value = getattr(before, f.name), getattr(after, f.name)
            if was != value and f.name not in _NAMES:
                found.append(f"--{f.name.replace('_', '-')} (was {was}, is {value})")
    return found


def from_dict(values: Mapping[str, Mapping[str, Any]], source: str) -> TrainSettings:
    """Return settings from the nested dict of `dataclasses.asdict`; unknown entries are ignored.

    Args:
        values: nested dict of the values.
        source: name of its file, for messages.

    Raises:
        DataError: a value has another type than its flag.
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
    """Return whether a value from JSON has a field's type; whole numbers are numbers, booleans are not."""
    if _is_union(kind):
        return any(_is_of(value, each) for each in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    return type(value) is kind or (kind is float and type(value) is int)


def _is_union(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union  # Union if it has a Literal


def _words_for(kind: Any) -> str:
    if _is_union(kind):
        return " or ".join(map(_words_for, typing.get_args(kind)))
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(typing.get_args(kind))}"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}.get(kind, "null")
