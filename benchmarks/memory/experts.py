"""A mixture of experts in a quarter of its memory beside llama.cpp with a memory map: tokens a second, and bytes read for a token.

    python benchmarks/memory/experts.py                # 6.6 GB of weights; writes benchmarks/results/memory_experts.json
    python benchmarks/memory/experts.py --layers 1 --tokens 8 --rounds 1 --output=   # a quick look, written nowhere

Both sides read the same GGUF file (F32, random weights, 64 experts of which 8 work on a token, written into a temporary directory) and process random
tokens one at a time, each in a memory cgroup of its own with the same limit, to which the system's cache of the file counts. Nothing of the file is
cached before. Our budget of RAM is a quarter of the weights; `REST` is left for the interpreter. The first quarter of the tokens does not count.
The bytes that a token needs are counted apart from the runtime's counters: for each flag that the router sets, the bytes of the expert that are not
in memory at that moment. The bytes that it reads are those of all system calls of the process. Needs Linux, root, the extra `real` and `gguf`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import common

OURS: Final = "ours"
LLAMA: Final = "llama.cpp, memory-mapped"
EXPERTS, CHOSEN, WIDTH, VOCAB = 64, 8, 1024, 512
REST: Final = 350 << 20
CGROUPS: Final = Path("/sys/fs/cgroup")


def write_file(folder: Path, num_layers: int, *, width: int = WIDTH, num_experts: int = EXPERTS, num_chosen: int = CHOSEN, kind: str = "f32") -> Path:
    """Write the model as a directory, a layer at a time, and convert it to a GGUF file with weights of a kind; only the file stays."""
    from safetensors.numpy import save_file
    from support.model_directories import write_model

    from nntask.data import load_tokenizer
    from nntask.export import Conversion, Convertible, write_gguf
    from nntask.models import FAMILIES

    heads = width // 128
    more = {"num_local_experts": num_experts, "num_experts_per_tok": num_chosen, "num_key_value_heads": min(8, heads)}
    config = FAMILIES["mixtral"].config.of_size(VOCAB, width, width, num_layers, heads, 512, **more)
    rng, index = np.random.default_rng(0), dict[str, str]()
    directory, target = folder / "directory", folder / "model.gguf"
    directory.mkdir()

    def matrix(rows: int) -> np.ndarray:
        return rng.standard_normal((rows, width), np.float32) / np.float32(np.sqrt(width))

    def save(number: int, tensors: dict[str, np.ndarray]) -> None:
        name = f"model-{number:05}.safetensors"
        save_file(tensors, directory / name, {"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    ones = np.ones(width, np.float32)
    save(0, {"model.embed_tokens.weight": 32 * matrix(VOCAB), "lm_head.weight": matrix(VOCAB), "model.norm.weight": ones})
    for layer in range(num_layers):
        tensors = {f"{norm}_layernorm.weight": ones for norm in ("input", "post_attention")}
        tensors |= {f"self_attn.{name}_proj.weight": matrix(width) for name in "qkvo"}
        tensors["block_sparse_moe.gate.weight"] = 2 * matrix(num_experts)
        tensors |= {f"block_sparse_moe.experts.{expert}.w{number}.weight": matrix(width) for expert in range(num_experts) for number in (1, 2, 3)}
        save(layer + 1, {f"model.layers.{layer}.{name}": values for name, values in tensors.items()})
    (directory / "config.json").write_text(json.dumps(config.to_dict()))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    write_model(folder / "tokenizer")  # llama.cpp opens no file without one
    write_gguf(Convertible.of(directory, config, None, load_tokenizer(folder / "tokenizer")), target, Conversion(kind))
    for path in directory.iterdir():
        path.unlink()
    return target


def read_nbytes() -> int:
    """Bytes that this process has read with system calls so far."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


class Needs:
    """Bytes of chosen experts that are not in memory when the router has chosen them, and the bytes of all that it has chosen.

    It looks at events before the machine does, and at nothing that the machine counts.
    """

    def __init__(self, runtime: Any) -> None:
        self.chosen = self.absent = 0
        machine = runtime._executor.machine
        self._handle = machine.handle
        machine.handle = self.handle

    def handle(self, event: Any) -> Any:
        """Note the flags of an event, and pass it on."""
        flags, task = getattr(event, "flags", None), getattr(event, "task", None)
        if flags is not None and task.step is not None:
            written, _ = task.accesses[task.spec.condition.flags]
            for after in task.successors:
                condition = after.spec.condition
                if condition is not None and condition.guard >= 0 and after.accesses[condition.guard][0] is written and flags[condition.number]:
                    weights = [handle for handle, mode in after.accesses if mode == "R" and handle.spec.kind == "persistent"]
                    self.chosen += sum(handle.spec.nbytes for handle in weights)
                    self.absent += sum(handle.spec.nbytes for handle in weights if 0 not in handle.replicas)
        return self._handle(event)


def run_ours(path: Path, ram: int, tokens: int, workers: int) -> dict[str, float]:
    """Our side: a text of random tokens, drawn at a high temperature."""
    from nntask.inference import Generator, ModelSource, Sampling
    from nntask.tiling import generation_tiling
    from scheduler import Runtime

    source = ModelSource.open(path)
    with Runtime(cpu_workers=workers, ram=ram, disk=path.parent) as runtime:
        generator = Generator(source.build(runtime, generation_tiling(source.config)), runtime, 512)
        needs, laps = Needs(runtime), list[tuple[float, ...]]()
        for _ in generator.stream([[5]], tokens, Sampling(temperature=100.0)):
            laps.append((perf_counter(), read_nbytes(), needs.absent, needs.chosen))
    seconds, read, absent, chosen = (np.array(laps[-1]) - np.array(laps[tokens // 4])) / (tokens - 1 - tokens // 4)
    return {"tokens_per_second": 1 / seconds, "read_bytes": read, "absent_bytes": absent, "chosen_bytes": chosen}


def run_llama(path: Path, tokens: int, workers: int) -> dict[str, float]:
    """The peer: random tokens, one at a time, with the settings that it comes with and as many threads."""
    from support.llama_cpp import LlamaCpp

    opened, laps = LlamaCpp(path, 512), list[float]()
    for _ in opened.steps([int(token) for token in np.random.default_rng(1).integers(0, VOCAB, tokens)], workers):
        laps.append(perf_counter())
    return {"tokens_per_second": (tokens - 1 - tokens // 4) / (laps[-1] - laps[tokens // 4])}


@contextmanager
def cgroup(nbytes: int) -> Iterator[Path]:
    """A new memory cgroup inside that of this process, which limits it to `nbytes`.

    Raises:
        SystemExit: this system makes none.
    """
    lines = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    own = CGROUPS / "memory" / lines["memory"].lstrip("/") if "memory" in lines else CGROUPS / lines[""].lstrip("/")
    group = own / f"experts-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise SystemExit(f"a memory cgroup must be made for this benchmark, and {error.strerror}: run it as root on Linux") from None
    try:
        (group / ("memory.limit_in_bytes" if "memory" in lines else "memory.max")).write_text(str(nbytes))
        yield group
    finally:
        group.rmdir()


def uncache(path: Path) -> None:
    """Drop the system's cache of a file."""
    with path.open("rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def comparisons(layers: int, found: dict[str, common.Measurement]) -> list[dict[str, Any]]:
    """Speed beside the peer, and bytes beside those that had to move."""
    ours = found[OURS]
    what = f"{EXPERTS} experts, {CHOSEN} per token, {layers} layers of {WIDTH}, fp32, RAM for a quarter of the weights"
    speeds = [found[side]["tokens_per_second"] for side in (OURS, LLAMA)]
    read, absent = ours["read_bytes"], ours["absent_bytes"]
    return [
        common.compare(what, "tokens/s", speeds[0], LLAMA, speeds[1], better="more", bar="ratio >= 1.5"),
        common.compare(
            f"{what}: read for a token", "bytes", read, "of chosen experts that are not in memory", absent, better="less", bar="ratio <= 1.05"
        ),
        common.compare(f"{what}: read for a token", "bytes", read, "of chosen experts", ours["chosen_bytes"], better="less"),
    ]


def main() -> None:
    """Run both sides in turn."""
    parser = common.parser(__doc__, "memory_experts")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a round")
    parser.add_argument("--rounds", type=int, default=2, help="times each side runs")
    parser.add_argument("--workers", type=int, default=common.usable_cores(), help="threads of each side")
    parser.add_argument("--folder", type=Path, help="where the model is, or is written; a temporary one unless given")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--cgroup", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        (args.cgroup / "cgroup.procs").write_text(str(os.getpid()))
        path = args.folder / "model.gguf"
        uncache(path)
        ours = args.side == OURS
        common.report(run_ours(path, path.stat().st_size // 4, args.tokens, args.workers) if ours else run_llama(path, args.tokens, args.workers))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        path = folder / "model.gguf"
        if not path.exists():
            write_file(folder, args.layers)
        again = [f"--folder={folder}", f"--workers={args.workers}", f"--tokens={args.tokens}"]
        with cgroup(path.stat().st_size // 4 + REST) as group:
            sides = [
                common.Side(name, common.this_script(__file__, f"--side={name}", f"--cgroup={group}", *again), common.one_thread_blas())
                for name in (OURS, LLAMA)
            ]
            machine, rounds, middle = common.measured(sides, args.rounds)
        common.finish(
            args.output,
            machine,
            ("nntask", "numpy", "xllamacpp"),
            {"layers": args.layers, "tokens": args.tokens, "rounds": args.rounds, "workers": args.workers, "weights_bytes": path.stat().st_size},
            comparisons(args.layers, middle),
            keep=args.layers == 8,
            medians=middle,
            rounds=rounds,
        )


if __name__ == "__main__":
    main()
