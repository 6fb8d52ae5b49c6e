"""``nntask serve``: a run, a checkpoint, a model directory or a GGUF file over HTTP, as OpenAI's clients speak it."""

from __future__ import annotations

import gc
import importlib.util
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from nntask.config import MachineSettings

from ..options.help import parse
from ..options.runtime_flags import machine_from, open_source, runtime_of

if TYPE_CHECKING:
    from nntask.data import ChatProcess
    from nntask.hardware import MachineSpec
    from nntask.inference import BatchShape, ModelSource, RunningBatch, TextIds
    from nntask.tiling import ModelTiling
    from wrappers.serve.app import Service

_KEY: Final = "NNTASK_API_KEY"
_LONGEST_KEY: Final = 8192
_NEEDED: Final = ("starlette", "uvicorn", "prometheus_client")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Address, limits and model of the server."""

    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 for all addresses of this machine"""
    port: int = 8000
    """port to listen on; 0 for any free port"""
    name: str = ""
    """name of the model for clients (default: the name of its directory)"""
    slots: int = 16
    """number of texts that are generated at the same time"""
    queue: int = 64
    """number of requests that may wait for a slot; more are refused with status 429"""
    max_context: int = 0
    """largest number of tokens of prompt and answer together; 0 for the context length of the model"""
    cache_tokens: int = 0
    """number of tokens of all texts together in the cache of keys and values; 0 chooses the need of all slots, limited by the free memory"""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """element type of weights and cache; auto is that of the run, and fp32 for a model directory"""
    tokenizer_path: str = ""
    """directory with tokenizer.json, for a model without a tokenizer"""
    chat_template: str = ""
    """file with a chat template in Jinja, for a tokenizer without one"""
    template_date: str = ""
    """date that chat templates receive, e.g. 2026-11-30 (default: the date of the request)"""
    strict_fields: bool = False
    """refuse requests with unknown fields, instead of ignoring these and naming them in a header"""
    api_key_file: str = ""
    """file whose first line is the key that requests must send (default: NNTASK_API_KEY in the environment, or no key)"""
    max_body: str = "1MiB"
    """largest size of a request, and of a conversation after the chat template is applied"""
    receive_seconds: float = 30.0
    """number of seconds in which the head of a request must arrive, and then its body"""
    grace_seconds: float = 30.0
    """number of seconds that running texts have to end after SIGTERM"""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Answer OpenAI's clients with a trained model. MODEL is a run directory, one of its checkpoints, a model directory of
    transformers, or a GGUF file."""

    server: ServerSettings = field(default_factory=ServerSettings)
    machine: MachineSettings = field(default_factory=MachineSettings)


def run(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns 0."""
    settings, words = parse(ServeSettings, argv, "nntask serve", words=("MODEL",))
    gc.disable()  # until the server is ready: the objects created before have no garbage worth a tenth of the time
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    asked = settings.server
    check(asked)
    machine = machine_from(settings.machine)
    from nntask.inference import BatchShape, fitted
    from nntask.tiling import generation_tiling

    source = open_source(words[0])
    ids = source.text_ids(source.tokenizer(asked.tokenizer_path))
    for note in ids.tokenizer.notes:
        print(f"tokenizer: {note}", file=sys.stderr, flush=True)
    tiling, context = generation_tiling(source.config, is_quantised=source.is_quantised), _context(asked, source)
    wanted = BatchShape.of(asked.slots, context)
    if asked.cache_tokens:
        wanted = BatchShape.of(asked.slots, context, -(-asked.cache_tokens // wanted.page))
    with _template(asked, ids) as template:  # its process starts while the memory is planned
        shape = fitted(source, tiling, asked.dtype, machine, wanted, is_exact=bool(asked.cache_tokens))
        _serve(asked, machine, source, tiling, shape, _service(asked, ids, template.result(), words[0]))
    return 0


def check(asked: ServerSettings) -> None:
    """Check the values of the flags.

    Raises:
        UsageError: the first value that breaks its rule, or the packages are not there.
    """
    from nntask import UsageError
    from nntask.io import LARGEST, parse_size

    rules = (
        ("--port", asked.port, 0 <= asked.port < 1 << 16, "from 0 to 65535", "0" if asked.port < 0 else "65535"),
        ("--slots", asked.slots, 1 <= asked.slots <= 1024, "from 1 to 1024", "1" if asked.slots < 1 else "1024"),
        ("--queue", asked.queue, 0 <= asked.queue <= LARGEST, "0 or more", "0"),
        ("--max-context", asked.max_context, 0 <= asked.max_context <= LARGEST, "0 or more", "0"),
        ("--cache-tokens", asked.cache_tokens, 0 <= asked.cache_tokens <= LARGEST, "0 or more", "0"),
        ("--receive-seconds", asked.receive_seconds, 0 < asked.receive_seconds <= 3600, "above 0 and at most 3600", "3600"),
        ("--grace-seconds", asked.grace_seconds, 0 <= asked.grace_seconds <= 3600, "from 0 to 3600", "0" if asked.grace_seconds < 0 else "3600"),
    )
    for flag, value, ok, rule, near in rules:
        if not ok:
            raise UsageError(f"must be {rule}, got {value}", f"the nearest legal value is {near}", flag=flag)
    if parse_size(asked.max_body, "--max-body") < 1:
        raise UsageError(f"must be at least 1 byte, got {asked.max_body}", "raise it", flag="--max-body")
    _clock(asked.template_date)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"serve needs the {missing[0].replace('_', '-')} package", "pip install -e '.[serve]'")


def _context(asked: ServerSettings, source: ModelSource) -> int:
    from nntask import UsageError

    if asked.max_context > source.context:
        raise UsageError(f"must be at most the model's context of {source.context}, got {asked.max_context}", "lower it", flag="--max-context")
    return asked.max_context or source.context


@contextmanager
def _template(asked: ServerSettings, ids: TextIds) -> Iterator[Future[ChatProcess | None]]:
    """Yield the process of the chat template, and close it at the end; it starts while the block's first statements run."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(_template_process, asked, ids)
        try:
            yield found
        finally:
            if found.exception() is None and (process := found.result()) is not None:
                process.close()


def _template_process(asked: ServerSettings, ids: TextIds) -> ChatProcess | None:
    """Return a process for the chat template; None if there is no usable template.

    Raises:
        DataError: --chat-template cannot be used.
    """
    from nntask import DataError
    from nntask.data import ChatProcess, ChatSource, template_notes
    from nntask.io import parse_size

    try:
        source = ChatSource.of(ids.tokenizer, asked.chat_template)
    except DataError:
        if asked.chat_template:
            raise
        return None
    for note in template_notes(ids.tokenizer, asked.chat_template) if asked.chat_template else ():
        print(f"nntask: {note}", file=sys.stderr)
    try:
        return ChatProcess(replace(source, tools=""), parse_size(asked.max_body, "--max-body"), _clock(asked.template_date))
    except DataError as error:
        if asked.chat_template:
            raise
        print(f"nntask: there are no conversations: {error}", file=sys.stderr)
        return None


def _clock(day: str) -> Callable[[], datetime]:
    """Return the function from which chat templates get the date.

    Raises:
        UsageError: `day` is not a date.
    """
    from nntask import UsageError

    if not day:
        return datetime.now
    try:
        date = datetime.fromisoformat(day)
    except ValueError:
        raise UsageError(f"must be a day as 2026-11-30, got {day!r}", "give one", flag="--template-date") from None
    return lambda: date


def _service(asked: ServerSettings, ids: TextIds, template: ChatProcess | None, model: str) -> Service:
    """Return the served model with the settings of the server."""
    import time

    from nntask.io import parse_size
    from wrappers.serve.app import Service
    from wrappers.serve.loopback import listens_locally

    from .. import release

    name, key = asked.name or Path(model).resolve().name, _key(asked.api_key_file)
    is_local = listens_locally(asked.host)
    if not is_local and not key:
        print(f"nntask: every program that reaches {asked.host} may use the model; give a key with {_KEY} or --api-key-file", file=sys.stderr)
    limits = (parse_size(asked.max_body, "--max-body"), asked.receive_seconds)
    return Service(name, int(time.time()), f"nntask-{release()}", ids, template, key, *limits, is_local, asked.strict_fields)


def _key(file: str) -> str:
    """Return the key that requests must send; "" for none.

    Raises:
        DataError: the file cannot be read, or has no key.
        UsageError: others may read the file, or the key cannot be sent.
    """
    from nntask import DataError, UsageError
    from nntask.io import open_text

    if not file:
        key, where = os.environ.get(_KEY, ""), _KEY
    else:
        where = f"--api-key-file {file}"
        try:
            with open_text(file) as lines:
                if os.fstat(lines.fileno()).st_mode & (stat.S_IRWXO):
                    raise UsageError(f"{where} may be read by everybody on this machine", "chmod o= it")
                key = lines.readline(_LONGEST_KEY).strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise DataError(f"{where} cannot be read: {why}", "give a file with the key in its first line") from None
        if not key:
            raise DataError(f"{where} has no key in its first line", "write one")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(f"{where} must be a key of printable ASCII without spaces, which clients can send", "choose another")
    return key


def _serve(asked: ServerSettings, machine: MachineSpec, source: ModelSource, tiling: ModelTiling, shape: BatchShape, service: Service) -> None:
    from nntask.inference import RunningBatch, TextRequest
    from wrappers.serve.app import Application
    from wrappers.serve.connections import most_texts
    from wrappers.serve.engine import TextEngine
    from wrappers.serve.jobs import Desk
    from wrappers.serve.metrics import Metrics
    from wrappers.serve.server import address_of, listening, serve

    @contextmanager
    def open_batch() -> Iterator[RunningBatch]:
        with runtime_of(machine, "--slots") as runtime:
            model = source.build(runtime, tiling, asked.dtype)
            batch = RunningBatch(model, runtime, shape, vocab_size=service.ids.vocab_size)
            batch.join(TextRequest((0,), 1))
            while batch.texts:  # weights are read, kernels compiled and the first step recorded before the server listens
                batch.step()
            gc.freeze()  # objects that exist by now live until the end
            gc.enable()
            yield batch

    desk = Desk()
    if (most_open := most_texts()) < asked.slots + asked.queue:
        why = "fewer than --slots and --queue together, since every text has a connection; raise ulimit -n, or lower --queue"
        print(f"nntask: at most {most_open} texts may run and wait, {why}", file=sys.stderr)
    engine = TextEngine(open_batch, service.ids.tokenizer.decode, min(most_open, asked.slots + asked.queue), desk.deliver, desk.fail)
    with listening(asked.host, asked.port) as listener:
        engine.start()
        cache = f"{shape.num_pages * shape.page:,} tokens of cache"
        print(f"{service.name}: {shape.slots} texts of at most {shape.longest:,} tokens side by side, {cache}")
        print(f"listening on {address_of(listener)}", flush=True)
        limits = {"receive_seconds": asked.receive_seconds, "grace_seconds": asked.grace_seconds}
        serve(Application(service, engine, desk, Metrics(engine)), engine, desk, listener, **limits)
