"""Sources of training settings, weakest first: defaults, the resumed run, a TOML file, the environment, the command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..output import complain
from .flags import FileEntry, Flag, Table, build, from_toml, merge, scan, table_of, values_of

if TYPE_CHECKING:
    from nntask.architecture import ModelConfig
    from nntask.checkpoints import Checkpoint
    from nntask.config import InitialModel, TrainSettings
    from nntask.hardware import MachineRequest, MachineSpec

CONFIG: Final = "config"
_ASKED_ANEW: Final = ("cluster", "observe")
"""Groups of settings that a resumed run does not keep."""
_OF_A_START: Final = ("resume", "run-dir")
"""Flags that determine where a run begins, which a resumed run does not keep."""


_LOST_ON_RESUME: Final = ("loss_reduction", "strict", "save_checkpoint", "save_optimizer")
"""Old settings that had an effect on a resumed run and have none now."""


_OLD_WEIGHTS: Final = "load_checkpoint"
"""Old key of a TOML file that names weights for the model of another flag, never a model."""


@dataclass(frozen=True, slots=True)
class SettingOrigin:
    """Key of a TOML file, or environment variable, that has set a flag.

    Args:
        name: key or variable.
        text: value that it has.
        value: value of the flag, another one if the key is of an earlier version.
        file: the TOML file; "" for a variable.
    """

    name: str
    text: str
    value: Any
    file: str = ""

    @property
    def subject(self) -> str:
        """The name, and the file that has it."""
        return f"{self.name} in {self.file}" if self.file else self.name

    def has(self, value: Any) -> bool:
        """Return whether this is the value that the flag has from here."""
        return str(value) == str(self.value)

    def assignment(self, *, is_first: bool) -> str:
        """Return name and value, as the file or a shell has them; the file is named only with `is_first`."""
        if not self.file:
            return f"{self.name}={self.text}"
        return f"{self.name} = {self.text}" + (f" in {self.file}" if is_first else "")


@dataclass(frozen=True, slots=True)
class Request:
    """The parsed command line of a training run.

    Args:
        settings: all settings; unset ones are None.
        machine: devices and memory that the settings ask for, in numbers; None for an imaginary machine.
        devices: workers and devices, with open defaults of budgets; None for an imaginary machine or a model without tiles.
        config: configuration of the model, with --dropout applied; None for a model without tiles.
        untiled: content and path of the config.json of a model without tiles; None for others.
        resumed: the checkpoint to continue from; None for a new run.
        extra: values of further flags of the command.
        sources: for each flag that was not typed, the variable or key that set it.
        stated: names of the flags on the command line or in the TOML file.
        values: values of the flags on the command line, in the TOML file and in the environment.
    """

    settings: TrainSettings
    machine: MachineRequest | None
    devices: MachineSpec | None
    config: ModelConfig | None
    untiled: tuple[Mapping[str, Any], str] | None
    resumed: Checkpoint | None
    extra: Mapping[str, Any]
    sources: Mapping[str, SettingOrigin]
    stated: frozenset[str]
    values: Mapping[str, Any]


@contextmanager
def naming(sources: Mapping[str, SettingOrigin]) -> Iterator[None]:
    """Let an error name the variable or key that has set a flag instead of the flag."""
    from nntask import NntaskError
    from nntask.config import flag_of

    try:
        yield
    except NntaskError as error:
        named = error.naming({flag_of(name.replace("-", "_")): origin for name, origin in sources.items()})
        if named is error:
            raise
        raise named from error


def request(argv: Sequence[str], environ: Mapping[str, str], extra: Mapping[str, type[bool] | type[str]] | None = None) -> Request:
    """Return the settings and model config of a command line.

    Args:
        argv: the words of the command line.
        environ: the environment variables.
        extra: further flags of the command: switches (bool) and texts (str). With `devices`, the machine is an imaginary one.

    Raises:
        UsageError: a flag or value is wrong, or names a missing device.
        DoesNotFit: the budget of GPUs is above the memory of a card.
        DataError: a named file is missing or broken.
    """
    from nntask import UsageError
    from nntask.config import TrainSettings, check_continued, check_values, request_of
    from nntask.hardware import requested_devices

    table = table_of(TrainSettings)
    explicit, sources, besides, stated = _explicit(argv, environ, table, extra or {})
    with naming(sources):
        resumed = _resumed(explicit)
        stored = _stored(resumed, table) if resumed else {}
        if (disk := stored.pop("disk", "")) and "disk" not in explicit:
            complain(f"a resumed run writes only to its directory; to use the disk tier of the run again, add: --disk {shlex.quote(disk)}")
        begin = explicit.get("init-from", "")
        if resumed and begin not in ("", stored.get("init-from", "")):
            raise UsageError("and --resume both say where to begin", "drop one of them", flag="--init-from", value=begin)
        if resumed and explicit.get("minibatch") == "auto":
            del explicit["minibatch"]  # the checkpoint has the number that was chosen
        values = merge(stored, explicit)
        settings = build(TrainSettings(), values, table)
        is_imaginary = bool(besides.get("devices"))
        try:
            check_values(settings)
        except UsageError as error:
            if resumed and error.flag.removeprefix("--") not in explicit:  # a stored value breaks a rule only together with a flag that differs
                check_continued(settings, resumed)
            raise
        requested = None if is_imaginary else request_of(settings.resources)
        untiled = _untiled(settings, resumed)
        devices = None if requested is None or untiled else requested_devices(requested, settings.model.dtype)
        config = None if untiled else model_config(settings, explicit, resumed)
        return Request(settings, requested, devices, config, untiled, resumed, besides, sources, stated, explicit)


def _explicit(
    argv: Sequence[str], environ: Mapping[str, str], table: Table, extra: Mapping[str, type[bool] | type[str]]
) -> tuple[dict[str, Any], dict[str, SettingOrigin], dict[str, Any], frozenset[str]]:
    """Return the fields `values`, `sources`, `extra` and `stated` of a `Request`; arguments are those of `request`."""
    from nntask.config import SUFFIXES, flags_from, unknown_variables

    known: Table = {**table, CONFIG: Flag(CONFIG, "", CONFIG, str), **{name: Flag(name, "", name, kind) for name, kind in extra.items()}}
    typed, _ = scan(argv, known)
    file = typed.pop(CONFIG, "")
    of_command = {name: typed.pop(name, kind()) for name, kind in extra.items()}
    explicit, entries = _read_config(file, table) if file else ({}, {})
    sources = {name: SettingOrigin(entry.key, entry.text, explicit[name], file) for name, entry in entries.items()}
    stated = {*explicit, *typed}
    set_by_environment: dict[str, Any] = {}
    for name, (text, variable) in flags_from(environ).items():
        stated -= {name} - typed.keys()
        for flag, value in values_of(table[name], text, variable, table).items():
            set_by_environment[flag] = value
            sources[flag] = SettingOrigin(variable if flag == name else f"{SUFFIXES[flag.replace('-', '_')].name} in {variable}", text, value)
    explicit = merge(explicit, set_by_environment)
    for sentence in unknown_variables(environ):
        complain(sentence)
    sources = {name: source for name, source in sources.items() if name not in typed}
    weights = {name for name, entry in entries.items() if entry.key.replace("-", "_") == _OLD_WEIGHTS}
    return merge(explicit, typed, weights), sources, of_command, frozenset(stated)


def _untiled(settings: TrainSettings, resumed: Checkpoint | None) -> tuple[Mapping[str, Any], str] | None:
    """Return the content and path of the config.json of a model that nntask has no tiles for; None for a model with tiles.

    Raises:
        DataError: --init-from names no model directory.
    """
    from nntask.config import initial_model
    from nntask.models import untiled_type

    if resumed is not None:
        from nntask.checkpoints import STATE

        values, source = resumed.state["model"], f"model in {resumed.path / STATE}"
    elif directory := initial_model(settings.checkpoints.init_from).directory:
        from nntask.hf import read_values

        values, source = read_values(directory)
    else:
        return None
    return (values, source) if untiled_type(values) else None


def _read_config(file: str, table: Table) -> tuple[dict[str, Any], dict[str, FileEntry]]:
    """Return the values and entries of a TOML file, as `from_toml`."""
    from nntask import DataError

    try:
        return from_toml(Path(file).read_text(encoding="utf-8"), file, table)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot be read: {getattr(error, 'strerror', None) or error}", "give an existing TOML file", flag="--config", value=file
        ) from None


def _resumed(explicit: Mapping[str, Any]) -> Checkpoint | None:
    """Return the checkpoint of --resume; None without the flag.

    Raises:
        UsageError: its value is empty, for example from an unset variable of a shell.
        DataError: there is no such checkpoint.
    """
    resume = explicit.get("resume")
    if resume is None:
        return None
    if not resume:
        from nntask import UsageError

        raise UsageError("must name a run or a checkpoint, got an empty name", "name one, or give no value for the newest run", flag="--resume")
    from nntask.checkpoints import find_checkpoint
    from nntask.training import newest_run

    if resume == "auto":
        resume = explicit.get("run-dir") or newest_run()
    return find_checkpoint(resume)


def _stored(checkpoint: Checkpoint, table: Table) -> dict[str, Any]:
    """Return the settings of the resumed run as flags, without those for its start and its observation."""
    from nntask.checkpoints import STATE
    from nntask.config import lost, stored_settings

    settings = stored_settings(checkpoint)
    stored = {name: value for group in checkpoint.state["settings"].values() for name, value in group.items()}
    for sentence in lost({name: stored[name] for name in _LOST_ON_RESUME if name in stored}, str(checkpoint.path / STATE)):
        complain(sentence)
    values: dict[str, Any] = {}
    for flag in table.values():
        value = getattr(getattr(settings, flag.group), flag.field)
        if value is not None and flag.group not in _ASKED_ANEW and flag.name not in _OF_A_START:
            values[flag.name] = value
    return values


def model_config(settings: TrainSettings, explicit: Mapping[str, Any] | None = None, resumed: Checkpoint | None = None) -> ModelConfig:
    """Return the config of the model that the settings name, with --objective and --dropout applied.

    A resumed run has a config of its own, which is used unless a flag names another one.

    Raises:
        UsageError: there is no such preset, or --objective does not fit the model.
        DataError: the config, or the data that determine its head, cannot be read.
    """
    import difflib

    from nntask import PRESETS, UsageError
    from nntask.architecture import config_values
    from nntask.config import TINY, brings_config, initial_model, with_head

    model = settings.model
    config: ModelConfig
    if resumed is not None and not {"model", "config-path"} & set(explicit or ()):
        config = resumed.config
    elif brings_config(settings.checkpoints.init_from):
        config = _initial_config(initial_model(settings.checkpoints.init_from))
    elif model.config_path is not None:
        config = _named(*config_values(model.config_path))
    else:
        name = TINY if model.model is None else model.model
        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, 1)
            raise UsageError(
                f"--model must be a preset that nntask models lists, got {name!r}; "
                + (f"did you mean {near[0]}?" if near else "choose one of them, or use --config-path")
            )
        config = PRESETS[name]
    if resumed is None:
        config = with_head(settings, config)
    if model.dropout is not None:
        config = config.with_dropout(model.dropout)
    return config


def _initial_config(begin: InitialModel) -> ModelConfig:
    """Return the config of the model of --init-from, and print the notes about its files."""
    from nntask.gguf import file_notes
    from nntask.hf import read_values

    if begin.checkpoint is not None:
        return begin.checkpoint.config
    assert begin.directory is not None  # a file of weights brings no config
    config = _named(*read_values(begin.directory))
    for sentence in file_notes(begin.directory):
        complain(sentence)
    return config


def _named(values: Mapping[str, Any], source: str) -> ModelConfig:
    """Return the config in a file, and print the notes about it.

    Raises:
        UsageError: the config breaks a rule.
    """
    from nntask.models import config_from_dict, config_notes

    config = config_from_dict(values, source)
    for sentence in config_notes(values, source):
        complain(sentence)
    return config
