"""All settings of a training run, as plain data in groups.

The name of a field with dashes is its flag, and the text under it is the flag's help. A field in `SUFFIXES` has no flag of its own but is the second
part of another flag's value. An unset value is None, and `resolution.resolve` fills it in. `old_settings` translates names of earlier versions.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, NamedTuple, TypeVar

from ..errors import DataError
from .old_settings import OLD_SETTINGS, translated

T = TypeVar("T")

Period = int  # number of steps; 0 means never


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Model and arithmetic."""

    model: str | None = None
    """built-in model; nntask models lists all, such as gpt2, llama-1b, bert-base (default: tiny)"""
    config_path: str | None = None
    """config of a model as a JSON file with Hugging Face keys, instead of --model; nntask models lists the supported families"""
    seq_len: int | None = None
    """number of tokens per sequence, at most n_positions of the config (default: n_positions, at most 4096)"""
    dtype: Literal["auto", "fp32", "tf32", "bf16", "fp64"] = "auto"
    """arithmetic: fp32 (also auto), tf32 (fp32 with TF32 products on GPUs), bf16 (bf16 values, fp32 masters and sums), or fp64"""
    dropout: float | None = None
    """probability of all dropouts in the model (default: the config's)"""
    attention: Literal["flash", "stored", "cudnn", "auto"] = "flash"
    """flash (no stored scores), stored (all scores in memory), cudnn (bf16 on GPUs; rounds differently), or auto (the faster of flash and cudnn)"""

    @property
    def gpu_attention(self) -> Literal["own", "cudnn", "auto"]:
        """Library that computes attention on GPUs: nntask's kernels, cuDNN, or "auto" until the faster one is measured."""
        return self.attention if self.attention in ("cudnn", "auto") else "own"


@dataclass(frozen=True, slots=True)
class TilingSettings:
    """Batch and tiles. In the flags of tiles, -1 is the whole dimension."""

    batch: int | None = None
    """number of sequences per optimizer step (default: 8 for tiny and llama-tiny, else 1)"""
    minibatch: int | Literal["auto"] = -1
    """number of sequences in flight at once, a divisor of --batch; gradients accumulate (-1: the whole batch; auto: the fastest that fits)"""
    minibatch_tile: int | None = None
    """number of sequences per tile, a divisor of the minibatch (default: from a table)"""
    seq_tile: int | None = None
    """number of tokens per tile (default: from a table)"""
    embd_tile: int | None = None
    """number of features (n_embd) per tile (default: from a table)"""
    inner_tile: int | None = None
    """number of features of the feed-forward layer per tile (default: from a table)"""
    head_tile: int | None = None
    """number of query heads per tile; heads that share a key/value head stay together (default: from a table)"""
    vocab_tile: int | None = None
    """number of vocabulary rows of the embedding and of the output layer per tile (default: from a table)"""
    auto_tile: Literal["table", "measured"] = "table"
    """source of tile sizes that are not set: table, or measured, which times steps; table@FILE and measured@FILE also use your own table"""
    tile_table: str = ""
    """TOML file of tile sizes for single model shapes, which overrides the built-in table; a search writes its result there"""
    lanes: int | None = None
    """number of partial sums of each gradient, which are computed in parallel and rounded differently; --dask needs several (default: 1)"""

    @property
    def num_sequences(self) -> int:
        """Number of sequences of a minibatch in filled settings."""
        assert self.minibatch != "auto"
        return self.minibatch


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Data, and what to learn from them."""

    dataset: str = "stdlib"
    """training data: stdlib (this machine's Python library), text (any files, also parquet), WikiText-103, train.bin, jsonl, or images"""
    dataset_path: str = ""
    """file, directory or pattern of files of the dataset; a missing WikiText-103 is downloaded to it"""
    val_path: str = ""
    """validation text or tokens (default: held-out texts, or val.bin in the directory of train.bin)"""
    dataset_select: int = -1
    """use only the first N texts (rows of WikiText-103, sequences of train.bin); -1 uses all"""
    tokenizer: str = "auto"
    """bpe (trained on the text), bytes, or the name of a tokenizer on the Hugging Face Hub; auto is bpe if the tokenizers package is installed"""
    tokenizer_path: str = ""
    """directory with tokenizer.json; a missing tokenizer from the Hub is downloaded to it"""
    objective: Literal["causal", "masked", "seq2seq", "classify"] | None = None
    """causal (next token), masked, seq2seq (output from input) or classify; masked:P and seq2seq:P hide a share P (default: the config's)"""
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
    """Optimizer, learning rate and adapters."""

    train: str = "all"
    """weights to train: all, or lora:RANK for LoRA adapters of that rank on frozen weights (Hu et al., 2021), lora:RANK:experts on experts, too"""
    lora_alpha: float | None = None
    """scale of LoRA adapters, whose product is multiplied by alpha / RANK (default: the rank)"""
    lora_dropout: float = 0.0
    """dropout probability of the inputs of LoRA adapters"""
    optimizer: Literal["adamw", "adam", "sgd", "muon", "adamw8bit"] = "adamw"
    """update rule of torch.optim; muon: AdamW for all but hidden matrices; sgd:MOMENTUM and muon:MOMENTUM, e.g. sgd:0.9 (default: 0; 0.95)"""
    lr: float | None = None
    """peak learning rate (default: 1e-3 for tiny and llama-tiny, else 3e-4)"""
    weight_decay: float = 0.0
    """weight decay of matrices; biases and norms have none"""
    optimizer_eps: float = 1e-8
    """epsilon of Adam, added to the denominator"""
    beta1: float = 0.9
    """decay of Adam's average gradient"""
    beta2: float = 0.95
    """decay of Adam's average squared gradient"""
    momentum: float | None = None
    """momentum of --optimizer sgd (default: 0) or muon (default: 0.95)"""
    grad_clip: float = 0.0
    """clip the norm of the whole gradient to this value; 0 does not clip"""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """learning rate schedule after the warm-up; wsd is constant, then decays over the last fifth"""
    warmup_steps: int | None = None
    """number of steps of linear warm-up (default: 10)"""
    warmup_start_lr: float | None = None
    """learning rate of step 1; it then grows linearly and reaches --lr at step --warmup-steps (default: --lr / --warmup-steps)"""
    min_lr: float = 0.0
    """learning rate at the end of --schedule linear, cosine or wsd"""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Length of training, validation and samples."""

    steps: int | None = None
    """number of optimizer steps, which overrides --nepochs (default: 200 without --nepochs)"""
    nepochs: int = 0
    """number of passes over the data"""
    eval_every: Period = 0
    """validate every N steps and at the end; 0 means never"""
    eval_batches: int = 8
    """number of batches per validation"""
    sample_tokens: int = 64
    """number of tokens of text to sample at the end, at most those that fit a sequence; 0 for none"""
    prompt: str = ""
    """beginning of the sampled text"""
    check_finite: bool = False
    """check for NaN after every task, and name the first task and tile that has one"""
    dry_run: bool = False
    """check all settings and print the resolved configuration, without training or writing anything"""


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Initial weights, checkpoints, and the directory of the run."""

    run_dir: str = ""
    """directory of the run (default: runs/<time>-<model>)"""
    resume: str = ""
    """continue a run exactly: its directory, one of its checkpoints, or auto (the run in --run-dir, else the newest in runs/)"""
    save_every: Period | None = None
    """save a checkpoint every N steps and at the end; 0 means never (default: only at the end)"""
    keep_checkpoints: int = 3
    """keep only the newest N checkpoints of the run"""
    init_from: str = ""
    """weights to start from: a Hugging Face directory, a GGUF file, a run or checkpoint, or with --model or --config-path a safetensors file"""


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """Devices and memory. Numbers differ by rounding between CPU and GPUs; no other setting here changes them."""

    ncpu: int | None = None
    """number of CPU workers (default: one per core, within the CPU quota; with GPUs 0, unless --update-on or @mixed gives CPU workers tasks)"""
    ngpu: int | None = None
    """number of GPUs; -1 is all and requires one, and NxP divides each of N GPUs into P devices (default: all if CuPy is installed)"""
    split_gpu: int = 1
    """number of devices that each GPU is divided into, with memory, kernels and copies of their own"""
    graphs: bool = True
    """fuse tasks on GPUs, into CUDA graphs if the step fits; --no-graphs launches every kernel on its own"""
    sim_gpu: int = 0
    """number of simulated GPUs, which compute on the CPU with memories of their own; N@RATE, e.g. 2@8GB/s, limits the speed of their links"""
    gpu_memory: str = ""
    """memory budget of each GPU or simulated device, e.g. 1GiB, or a share of a GPU, e.g. 0.25 (default: 0.9 of its free memory, or --ram)"""
    sim_bandwidth: str = ""
    """bytes per second of each link of a simulated device, e.g. 8GB/s (default: the speed of memory copies)"""
    ram: str = ""
    """memory budget in RAM, e.g. 2GiB (default: 0.9 of the free memory); a model that needs more also needs --disk"""
    disk: str = ""
    """disk tier below RAM, DIR or DIR:SIZE: a temporary file in DIR of at most SIZE bytes (default: the free space)"""
    sched: Literal["auto", "eager", "prio", "lws", "dm", "dmda", "dmdas", "reuse"] = "auto"
    """policy that assigns tasks to workers, under StarPU's names; dmdas@mixed lets GPUs and CPU share tasks, @pinned:FILE repeats a recorded run"""
    evict: Literal["next-use", "lru", "fifo"] = "next-use"
    """which data leave a full memory: next-use (needed last), lru (least recently used), or fifo (oldest)"""
    prefetch: bool = True
    """copy data to a memory before tasks need them there; --no-prefetch copies on demand"""
    watchdog: float | None = None
    """seconds without an ended task after which a report says once which tasks run, which wait, and why (default: no report)"""


@dataclass(frozen=True, slots=True)
class ResourceSettings(MachineSettings):
    """Devices and memory. Losses differ by rounding between CPU and GPUs; no other setting here changes them."""

    order: str = "auto"
    """order of a step's tasks if memory is short: auto, or one that the guide Memory and disk lists, e.g. layers or turn:4/8"""
    recompute: str = "auto"
    """activation checkpointing: auto (if memory is short), none, block (keep inputs of blocks only), or operations, e.g. layer_norm"""
    assignment: str = ""
    """kinds of workers of tasks with kernels for CPU and devices: devices (default), mixed (by expected end), or pinned:FILE (as recorded)"""
    update_on: Literal["device", "cpu", "auto"] = "device"
    """where the optimizer runs: device, cpu (its state stays in RAM), or auto for the faster one by forecast"""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Several machines. No setting here changes a loss."""

    dask: str = ""
    """train on a Dask cluster: the address of its scheduler, or local:N for N workers on this machine; needs --lanes"""
    nodes: int | None = None
    """number of Dask workers to wait for and to use (default: all that have joined, at most one per lane)"""
    link_bandwidth: str = ""
    """largest number of bytes per second that each Dask worker sends to others, e.g. 100MB (default: no limit)"""
    transport: Literal["dask", "nccl"] = "dask"
    """how nodes exchange gradients: dask, dask@RATE (at most RATE sent by each, e.g. dask@100MB/s), or nccl from GPU to GPU, unencrypted"""


@dataclass(frozen=True, slots=True)
class ObserveSettings:
    """Metrics, traces and explanations."""

    trace: str = ""
    """write a Chrome trace to this file, compressed if its name ends in .gz (default with --trace-steps: trace.json.gz in the run's directory)"""
    trace_steps: str = ""
    """trace steps A:B, both included, or all, for nntask report; @FILE sets the file (default: trace.json.gz in the run's directory)"""
    report_to: Literal["none", "tensorboard"] = "none"
    """tensorboard also writes the metrics of each step as event files to the folder tensorboard of the run"""
    explain: str = ""
    """explain the first three placements on workers of tasks whose name contains this text"""


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


EXPERT: Final = frozenset(
    (
        *("attention", "minibatch_tile", "seq_tile", "embd_tile", "inner_tile", "head_tile", "vocab_tile", "auto_tile", "target_len", "lora_dropout"),
        *("optimizer_eps", "beta1", "warmup_start_lr", "prompt", "check_finite", "graphs", "sched", "evict", "prefetch", "order", "update_on"),
        *("nodes", "transport", "trace_steps", "explain", "watchdog"),
    )
)
"""Settings whose flags only ``--help-all`` shows."""


class Suffix(NamedTuple):
    """Place of a setting in the value of another setting's flag: ``--FLAG VALUE SEPARATOR PART``.

    Args:
        flag: setting whose flag it is.
        separator: text between the value and the part.
        name: word for the part in messages.
        example: value of the flag that may have the part.
        condition: condition under which the example may be used, as the end of a sentence; "" for none.
        without: values of the flag that have no part.
    """

    flag: str
    separator: str
    name: str
    example: str
    condition: str = ""
    without: tuple[str, ...] = ()


SUFFIXES: Final[Mapping[str, Suffix]] = {
    "sim_bandwidth": Suffix("sim_gpu", "@", "RATE", "1", without=("0",)),
    "split_gpu": Suffix("ngpu", "x", "PARTS", "1", without=("0",)),
    "link_bandwidth": Suffix("transport", "@", "RATE", "dask", without=("nccl",)),
    "assignment": Suffix("sched", "@", "ASSIGNMENT", "auto", without=("eager", "prio", "lws", "reuse")),
    "trace": Suffix("trace_steps", "@", "FILE", "all"),
    "tile_table": Suffix("auto_tile", "@", "FILE", "table"),
    "momentum": Suffix("optimizer", ":", "MOMENTUM", "sgd", without=("adamw", "adam", "adamw8bit")),
    "mask_probability": Suffix("objective", ":", "SHARE", "masked", "with a model such as bert-tiny, or drop it", ("causal", "classify")),
}
"""Settings without a flag of their own."""


def known(value: T | None) -> T:
    """Return a value that `nntask.config.resolution.filled` has set."""
    assert value is not None
    return value


def typed(group: Any, name: str) -> str:
    """Return the value of a setting as its flag takes it, with the settings in `SUFFIXES` that belong to it and are not the default."""
    defaults = {f.name: f.default for f in fields(group)}
    inner = [other for other, suffix in SUFFIXES.items() if suffix.flag == name and getattr(group, other) != defaults[other]]
    suffixes = [f"{SUFFIXES[other].separator}{getattr(group, other)}" for other in inner]
    value = getattr(group, name)
    return "".join(["" if value is None else str(value), *suffixes])


def flag_of(name: str) -> str:
    """Return the name of a setting for messages: its flag, or for one in `SUFFIXES` its part of a flag, such as "FILE in --trace-steps"."""
    suffix = SUFFIXES.get(name)
    return f"--{name.replace('_', '-')}" if suffix is None else f"{suffix.name} in --{suffix.flag.replace('_', '-')}"


def from_dict(values: Mapping[str, Mapping[str, Any]], source: str) -> TrainSettings:
    """Return settings from the nested dict of `dataclasses.asdict`, of this version or an earlier one; unknown entries are ignored.

    Args:
        values: nested dict of the values.
        source: name of its file, for messages.

    Raises:
        DataError: a value has another type than its flag.
        UsageError: settings of an earlier version contradict each other.
    """
    kinds = {f.name: typing.get_type_hints(f.default_factory) for f in fields(TrainSettings)}
    flat: dict[str, Any] = {}
    for group, of_group in kinds.items():
        known_kinds = {**OLD_SETTINGS, **of_group}
        for key, value in values.get(group, {}).items():
            if key in known_kinds:
                if not _is_of(value, known_kinds[key]):
                    raise DataError(
                        f"settings.{group}.{key} in {source} must be {_words_for(known_kinds[key])}, got {value!r}", "use another checkpoint"
                    )
                flat[key] = value
    flat = translated(flat, source)
    return TrainSettings(**{f.name: _group(f.default_factory, flat) for f in fields(TrainSettings)})


def _group(group: Any, flat: Mapping[str, Any]) -> Any:
    """Return a group of settings with its values in `flat`."""
    return group(**{f.name: flat[f.name] for f in fields(group) if f.name in flat})


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
        words = typing.get_args(kind)
        return words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}.get(kind, "null")
