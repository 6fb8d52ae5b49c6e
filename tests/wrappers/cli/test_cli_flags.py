"""Flags as text: the command line, TOML and the environment accept and refuse the same things."""

import itertools
import json
import os
import re
import tomllib
from pathlib import Path

import pytest
from support.commands import flag_tables

from nntask.config.environment import VARIABLES, flags_from, unknown_variables
from nntask.config.old_settings import OLD_SETTINGS
from nntask.config.resolution import filled
from nntask.config.settings import EXPERT, SUFFIXES, TrainSettings, typed
from nntask.config.toml import to_toml
from nntask.errors import UsageError
from nntask.io.units import format_count, format_duration, format_size, parse_rate, parse_size
from nntask.models.registry import PRESETS
from wrappers.cli import main
from wrappers.cli.options.flags import build, from_toml, merge, scan, table_of
from wrappers.cli.options.sources import naming, request

TABLE = table_of(TrainSettings)


class NoCards:
    """A machine without GPUs."""

    def choose(self, count):
        """None of them."""
        return []


ARABIC = str.maketrans("0123456789", "".join(chr(0x660 + digit) for digit in range(10)))
NUMBERS = (
    *("train --train=lora:4", "train --train=lora:4:experts", "train --order=layers:2", "train --trace-steps=1:2", "train --recompute=gelu:0.5"),
    *("train --dask=local:2", "train --dask=tcp://host:8786", "train --ram=64MiB", "train --ram=1,000MB", "train --disk=tier:1GB"),
    *("train --sim-gpu=1@1GB/s", "train --sim-gpu=1 --gpu-memory=64MiB", "plan --devices=1x8GiB", "plan --devices=8GiB@5TF"),
    *("plan --devices=8GiB --link=5GB/s", "serve nothing --port=8000", "generate nothing --prompt=a --temperature=0.5", "bench overhead --tasks=9"),
)


def test_numbers_have_ascii_digits(capsys):
    """Python takes digits of every alphabet and underscores between them; flags take neither, wherever a number is part of their value."""
    for command, table in flag_tables():
        for flag in table.values():
            if flag.value_type in (int, float):
                for text in ("\u0664", "1_0"):
                    with pytest.raises(UsageError):
                        flag.convert(text, f"{command} --{flag.name}")
    for line in NUMBERS:
        *words, last = line.split()
        flag, _, value = last.partition("=")
        assert main([*words, f"{flag}={value.translate(ARABIC)}"]) == 2, line
        assert flag in capsys.readouterr().err


def test_dashes_underscores_and_equals_are_one():
    """The four ways to write a flag set the same field; the last of equal flags wins."""
    for argv in (["--seq-tile", "64"], ["--seq_tile=64"], ["--seq_tile", "64"], ["--seq-tile=1", "--seq-tile=64"]):
        values, _ = scan(argv, TABLE)
        assert build(TrainSettings(), values, TABLE).tiling.seq_tile == 64
    values, _ = scan(["--minibatch", "-1", "--no-prefetch", "--check-finite", "--prompt=--x"], TABLE)
    assert values == {"minibatch": -1, "prefetch": False, "check-finite": True, "prompt": "--x"}


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("--sim-gpu=2@8GB/s", {"sim-gpu": 2, "sim-bandwidth": "8GB/s"}),
        ("--ngpu=-1x4", {"ngpu": -1, "split-gpu": 4}),
        ("--transport=dask@1MB", {"transport": "dask", "link-bandwidth": "1MB"}),
        ("--trace-steps=2:3@a@b.json", {"trace-steps": "2:3", "trace": "a@b.json"}),
        ("--auto-tile=measured@t.toml", {"auto-tile": "measured", "tile-table": "t.toml"}),
        ("--objective=masked:0.3", {"objective": "masked", "mask-probability": 0.3}),
    ],
)
def test_a_value_may_have_a_second_part(word, values):
    """It sets a setting of its own, on the command line and in a file, and is typed again as it was."""
    assert scan([word], TABLE)[0] == values
    key, _, value = word.removeprefix("--").partition("=")
    assert from_toml(f'{key} = "{value}"', "x.toml", TABLE)[0] == values
    settings = build(TrainSettings(), values, TABLE)
    assert typed(getattr(settings, TABLE[key].group), TABLE[key].field) == value


def test_every_part_has_a_flag():
    """A part belongs to a flag that is none itself; typing the part's name is answered with that flag."""
    assert not {suffix.flag for suffix in SUFFIXES.values()} & SUFFIXES.keys()
    for name, suffix in SUFFIXES.items():
        assert suffix.flag in {flag.field for flag in TABLE.values()}
        flag = name.replace("_", "-")
        with pytest.raises(UsageError, match=f"--{flag} 3 is now the second part of another flag; use --{suffix.flag.replace('_', '-')} "):
            scan([f"--{flag}=3"], TABLE)


@pytest.mark.parametrize(("command", "table"), list(flag_tables()), ids=lambda each: each if isinstance(each, str) else "")
def test_every_flag_of_every_command_takes_its_example(command, table):
    """Joined or as two words; a setting that is the second part of another flag of the same command is typed there."""
    assert table
    for name, flag in table.items():
        suffix = SUFFIXES.get(flag.field)
        if suffix is not None and suffix.flag.replace("_", "-") in table:
            continue
        for words in ([f"--{name}={flag.example}"], [f"--{name}", flag.example]):
            if flag.value_type is not bool:
                assert scan(words, table)[0] == {name: flag.convert(flag.example, name)}, f"nntask {command} {words}"
        if flag.value_type is bool:
            assert [scan([word], table)[0] for word in (f"--{name}", f"--no-{name}")] == [{name: True}, {name: False}]


def test_resume_alone_means_auto():
    """``--resume`` needs no value, at the end or before another flag."""
    assert scan(["--resume"], TABLE)[0] == {"resume": "auto"}
    assert scan(["--resume", "--steps", "3"], TABLE)[0] == {"resume": "auto", "steps": 3}
    assert scan(["--resume", "runs/a"], TABLE)[0] == {"resume": "runs/a"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--minbatch=4"], "unknown flag --minbatch; did you mean --minibatch?"),
        (["--ran=70MB"], "unknown flag --ran; did you mean --train or --ram?"),
        (["--zzz"], "unknown flag --zzz; see --help"),
        (["--no-zzz"], "unknown flag --no-zzz; see --help"),
        (["--lr=fast"], "--lr must be a number, got 'fast'; write one"),
        (["--batch=1.5"], "--batch must be a whole number, got '1.5'; write one"),
        (["--dtype=zzz"], "--dtype must be one of auto, fp32, tf32, bf16, fp64, got 'zzz'; choose one of them"),
        (["--dtype=fp23"], "--dtype must be one of auto, fp32, tf32, bf16, fp64, got 'fp23'; did you mean"),
        (["--optimizer=adamw8"], "--optimizer must be one of adamw, adam, sgd, muon, adamw8bit, got 'adamw8'; did you mean adamw8bit?"),
        (["--no-graphs=3"], "--no-graphs takes no value, got '3'; write --no-graphs to turn it off, or --graphs"),
        (["--no-graphs="], "--no-graphs takes no value, got ''; write --no-graphs to turn it off, or --graphs"),
        (["--graphs=maybe"], "--graphs must be true or false"),
        (["--optimizer=fusedadamw"], "--optimizer must be one of adamw, adam, sgd, muon, adamw8bit, got 'fusedadamw'; use adamw, which is the same"),
        (["--no-flashattention"], "--no-flashattention was removed; use --attention stored"),
        (["--no-nforward"], "unknown flag --no-nforward; "),
        (["--batch"], "--batch needs a value"),
        (["8"], "unexpected word '8'"),
        (["--logger"], "--logger is not offered: --report-to tensorboard"),
    ],
)
def test_mistakes_get_one_sentence(argv, words):
    """Each message names the flag, the value and what is legal."""
    with pytest.raises(UsageError) as error:
        scan(argv, TABLE)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


SWITCHES = [name for name, kind in OLD_SETTINGS.items() if kind is bool]


@pytest.mark.parametrize("name", list(OLD_SETTINGS))
def test_a_removed_flag_is_answered_with_its_replacement(name, capsys):
    """Exit code 2, the flag with its value, and what to type instead; no old flag is a flag, and no named one is missing."""
    flag = name.replace("_", "-")
    assert flag not in TABLE
    word = f"--no-{flag}" if name == "flashattention" else f"--{flag}" if name in SWITCHES else f"--{flag}=3"
    assert main(["train", word]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"nntask: {word} was removed; ")
    assert not err.endswith("; drop it\n")
    assert {found.rstrip(",") for found in re.findall(r"--([a-z][\w-]*)", err)} <= {*TABLE, "format", word.removeprefix("--").partition("=")[0]}


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("--restrict=cpu", "use --ngpu 0, for no GPU"),
        ("--restrict=cuda", "use --ngpu -1, for all GPUs, of which there must be one"),
        ("--restrict", "use --ngpu 0 for no GPU, or --ngpu -1 for all GPUs, of which there must be one"),
        ("--gpu-attention=cudnn", "use --attention cudnn"),
        ("--gpu-attention=auto", "use --attention auto"),
    ],
)
def test_the_replacement_is_that_of_the_value(word, advice):
    """The advice lists no alternatives that another value would have."""
    with pytest.raises(UsageError) as error:
        scan([word], TABLE)
    assert str(error.value) == f"{word} was removed; {advice}"


@pytest.mark.parametrize(
    "words",
    [
        *("--no-redux", "--no-fp32-fast-tf32", "--no-strict", "--flashattention", "--redux=false", "--start-lr=0", "--start-lr=0.0", "--nforward 0"),
        *("--full_lr_iter=1", "--loss-reduction=mean", "--restrict none", "--gpu-attention=own", "--save-checkpoint=", "--save-optimizer-dtype=fp32"),
    ],
)
def test_a_removed_flag_that_asks_for_nothing_is_dropped(words):
    """Its replacement would ask for something."""
    with pytest.raises(UsageError, match=r"was removed; drop it$"):
        scan(words.split(), TABLE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sim-bandwidth", "8GB/s"),
        ("split-gpu", 2),
        ("link-bandwidth", "1MB"),
        ("trace", "x.json"),
        ("tile-table", "x.toml"),
        ("mask-probability", 0.2),
    ],
)
def test_the_replacement_of_a_part_is_accepted(name, value):
    """As it is printed; it sets the part to the value that was typed."""
    with pytest.raises(UsageError) as error:
        scan([f"--{name}", str(value)], TABLE)
    values, _ = scan(re.findall(r"(?<=; use )(--\S+ \S+?)(?=,|$| with)", str(error.value))[0].split(), TABLE)
    assert values[name] == value
    model = "bert-tiny" if name == "mask-probability" else "tiny"
    more = {"dask": "local:2", "lanes": 2} if name == "link-bandwidth" else {}
    filled(build(TrainSettings(), {**values, **more, "model": model}, TABLE), PRESETS[model])


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--trace F --trace-steps 2:3", "use --trace-steps 2:3@F"),
        ("--trace_steps=2:3@G --trace=F", "use --trace-steps 2:3@F"),
        ("--trace-steps 1:9 --trace F --trace-steps 2:3", "use --trace-steps 2:3@F"),
        ("--trace F", "use --trace-steps all@F"),
        ("--trace F --trace-steps", "use --trace-steps all@F"),
        ("--split-gpu 2 --ngpu=4", "use --ngpu 4x2"),
        ("--ngpu -1 --split-gpu 2", "use --ngpu -1x2"),
        ("--sim-gpu 3 --sim-bandwidth 8GB/s", "use --sim-gpu 3@8GB/s"),
        ("--sim-gpu 0 --sim-bandwidth 8GB/s", "drop it, since --sim-gpu 0 has none"),
        ("--tile-table t.toml --auto-tile measured", "use --auto-tile measured@t.toml"),
        ("--link-bandwidth 1MB --transport nccl", "drop it, since --transport nccl has none"),
        ("--mask-probability 0.3", "use --objective masked:0.3 with a model such as bert-tiny, or drop it"),
        ("--mask-probability 0.3 --model bert-tiny --objective masked", "use --objective masked:0.3"),
        ("--mask-probability 0.3 --objective seq2seq", "use --objective seq2seq:0.3"),
        ("--mask-probability 0.3 --objective causal", "drop it, since --objective causal has none"),
    ],
)
def test_the_advice_about_a_part_has_what_was_typed(words, advice):
    """The value of the whole flag on the same command line, before or after; a value that takes no part is answered with dropping it."""
    with pytest.raises(UsageError) as error:
        scan(words.split(), TABLE)
    assert str(error.value).endswith(f" is now the second part of another flag; {advice}")


@pytest.mark.parametrize(
    "words", ["--sim-gpu=2@", "--ngpu=1x", "--transport dask@", "--trace-steps=2:3@", "--auto-tile=table@", "--objective=masked:"]
)
def test_an_empty_part_is_refused(words):
    """The message names the part, and ends with what to do."""
    flag = words.removeprefix("--").replace(" ", "=").partition("=")[0].replace("-", "_")
    (suffix,) = (each for each in SUFFIXES.values() if each.flag == flag)
    with pytest.raises(UsageError, match=rf"lacks {suffix.name} at its end; add it, or drop {suffix.separator}$"):
        scan(words.split(), TABLE)


@pytest.mark.parametrize(
    ("file", "words", "values"),
    [
        ('objective = "masked:0.3"', "--objective causal", {"objective": "causal"}),
        ('sim_gpu = "2@8GB/s"', "--sim-gpu 0", {"sim-gpu": 0}),
        ("ngpu = 2\nsplit_gpu = 2", "--ngpu=1", {"ngpu": 1}),
        ('transport = "dask@1MB"', "--transport=nccl", {"transport": "nccl"}),
        ('trace_steps = "2:3@a.json"', "--trace-steps=all", {"trace-steps": "all"}),
        ('auto_tile = "table@a.toml"', "--auto-tile=table@b.toml", {"auto-tile": "table", "tile-table": "b.toml"}),
        ('sim_gpu = "2@8GB/s"', "--ncpu=1", {"sim-gpu": 2, "sim-bandwidth": "8GB/s", "ncpu": 1}),
    ],
)
def test_a_flag_without_its_part_resets_the_part(file, words, values):
    """A typed flag is stronger than all of the file's value."""
    assert merge(from_toml(file, "x.toml", TABLE)[0], scan(words.split(), TABLE)[0]) == values


def resolved(argv):
    """Settings of a command line with every default filled in; errors are those of ``nntask train``."""
    asked = request(argv, {})
    with naming(asked.sources):
        return filled(asked.settings, asked.config)


def test_errors_name_what_was_set():
    """A part that an environment variable has set is named by the variable, also in an error that begins with the part."""
    for environ, words in (
        ({"NNTASK_SIM_BANDWIDTH": "fast"}, "NNTASK_SIM_BANDWIDTH must be bytes"),
        ({"NNTASK_SPLIT_GPU": "0"}, "NNTASK_SPLIT_GPU must be"),
    ):
        with pytest.raises(UsageError) as error:
            request(["--ncpu=1"], {**environ, "NNTASK_SIM_GPU": "1"})
        assert str(error.value).startswith(words)


@pytest.mark.parametrize(
    ("file", "argv", "words"),
    [
        ('restrict = "cuda"', [], "restrict = cuda in {} needs a GPU, and "),
        ('restrict = "cuda"', [], "; drop restrict = cuda, or "),
        ('restrict = "cuda"', ["--sim-gpu=1"], "devices are real or simulated, got restrict = cuda in {} and --sim-gpu 1; drop"),
        ("start_lr = -1.0\nfull_lr_iter = 3", [], "start_lr in {} must be a finite number of at least 0, got -1;"),
        ("full-lr-iter = 0", [], "full-lr-iter in {} must be at least 1, got 0;"),
        ("nepochs_warmup = -1", [], "nepochs_warmup in {} must be 0 or more, got -1;"),
        ("nepochs = -1", [], "nepochs in {} must be 0 or more, got -1;"),
        ('load_checkpoint = "nope"\nmodel = "tiny"', [], "load_checkpoint = nope in {} brings its own config and weights, and model = tiny in {}"),
        ('gpu_attention = "cudnn"', [], "gpu_attention = cudnn in {} computes in bf16, got --dtype auto;"),
        ('[resources]\nsim-gpu = "1@fast"', [], "RATE in sim-gpu in {} must be bytes"),
        ("sim-gpu = 1\nsim_bandwidth = 'fast'", [], "sim_bandwidth in {} must be bytes"),
        (
            "mask-probability = 0.3",
            [],
            "mask-probability in {} is for masked and seq2seq, which hide tokens, got 0.3 with --objective causal; drop it",
        ),
        ('objective = "causal:0.3"', [], "SHARE in objective in {} is for masked and seq2seq"),
        ("seq-len = 17", ["--dtype=zz"], "--dtype must be one of"),
        ('ram = "12XB"', [], "ram in {} must be a size"),
        ("momentum = 0.5", [], "momentum = 0.5 in {} belongs to sgd and muon, not adamw;"),
    ],
)
def test_an_error_names_the_key_of_the_file(file, argv, words, tmp_path, monkeypatch):
    """As the file has it, with its value if the message has that of the flag; a key of an earlier version, too."""
    monkeypatch.setattr("nntask.hardware.gpus.cards", NoCards())
    path = tmp_path / "x.toml"
    path.write_text(file)
    with pytest.raises(UsageError) as error:
        resolved([f"--config={path}", *argv])
    message = str(error.value)
    assert words.replace("{}", str(path)) in message


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"NNTASK_NGPU": "0", "NNTASK_NCPU": "0"}, "NNTASK_NCPU=0 needs a device: add"),
        ({"NNTASK_SIM_GPU": "1@fast"}, "RATE in NNTASK_SIM_GPU must be bytes per second"),
        ({"STARPU_NCPU": "-1"}, "STARPU_NCPU must be 0 or more, got -1"),
    ],
)
def test_an_error_names_the_variable(environ, words):
    """With its value as a shell has it."""
    with pytest.raises(UsageError) as error:
        request([], environ)
    assert str(error.value).startswith(words)


@pytest.mark.parametrize("spelled", [str, lambda key: key.replace("_", "-")])
@pytest.mark.parametrize(
    "values",
    [
        {"redux": True, "lanes": 2},
        {"flashattention": False, "gpu_attention": "cudnn"},
        {"full_lr_iter": 5, "warmup_steps": 3},
        {"full_lr_iter": 5, "warmup_start_lr": 0.1},
        {"full_lr_iter": 0},
        {"restrict": "cpu", "sim_gpu": 2},
        {"load_checkpoint": "w.safetensors", "init_from": "run"},
    ],
)
def test_keys_are_spelt_as_the_file_has_them(spelled, values):
    """With dashes or with underscores, in errors about old keys and the present ones that they contradict."""
    keys = [spelled(key) for key in values]
    with pytest.raises(UsageError) as error:
        from_toml("\n".join(f"{key} = {json.dumps(value)}" for key, value in zip(keys, values.values(), strict=True)), "x.toml", TABLE)
    other = {key.replace("-", "_") if "-" in key else key.replace("_", "-") for key in keys} - set(keys)
    assert any(key in str(error.value) for key in keys)
    assert not any(key in str(error.value) for key in other)


def test_complaints_spell_the_key_as_the_file_has_it(capsys):
    """Those about old settings without an effect."""
    from_toml("nforward-warmup = 2\nsave_checkpoint = 'w'", "x.toml", TABLE)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" in x.toml")[0] for line in lines] == ["nntask: nforward-warmup", "nntask: save_checkpoint"]


@pytest.mark.parametrize("way", ["--config-path=small.json", "--model=tiny"])
def test_weights_of_a_file_are_used_with_a_typed_model_or_refused(way, tmp_path, monkeypatch):
    """load_checkpoint names weights of the model of another flag, so typing that flag does not drop them silently."""
    monkeypatch.chdir(tmp_path)
    Path("small.json").write_text(json.dumps(PRESETS["tiny"].to_dict()))
    Path("x.toml").write_text('load_checkpoint = "w.safetensors"')
    assert request(["--config=x.toml", way, "--ncpu=1"], {}).settings.checkpoints.init_from == "w.safetensors"
    Path("x.toml").write_text('load_checkpoint = "w"')
    with pytest.raises(UsageError, match=r"^load_checkpoint = w in x.toml brings its own config and weights, and --(config-path|model) "):
        request(["--config=x.toml", way, "--ncpu=1"], {})
    Path("x.toml").write_text('init_from = "w"')
    assert request(["--config=x.toml", way, "--ncpu=1"], {}).settings.checkpoints.init_from == ""


@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_shows_few_flags_and_help_all_the_others(command, capsys):
    """At most 50 and 75 flags of train; each setting but a part is in one of them, with a sentence."""
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([command, flag])
        shown[flag] = re.findall(r"^  --([a-z][\w-]*)", capsys.readouterr().out, re.MULTILINE)
    own = 5 if command == "plan" else 0
    assert len(shown["--help"]) <= 50 + own
    assert len(shown["--help-all"]) <= 75 + own
    assert {name.replace("_", "-") for name in EXPERT} == set(shown["--help-all"]) - set(shown["--help"])
    assert set(TABLE) - {name.replace("_", "-") for name in SUFFIXES} <= set(shown["--help-all"])


@pytest.mark.parametrize("columns", [100, 180, 300])
def test_help_has_one_column(columns, monkeypatch, capsys):
    """Flags and their words stand at the same places in every line, however wide the terminal is, and no sentence is broken before its end."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert os.environ["COLUMNS"] == str(columns)
    body = lines[next(at for at, line in enumerate(lines) if line.startswith("  -h, --help")) :]
    assert all(re.match(r"(| [A-Z].*| {2}[a-z].*\.| -+|  -.*| {24}\S.*|nntask train --help-all .*)$", line) for line in body), body
    assert all(after[1].isupper() or after.startswith("nntask ") for line, after in itertools.pairwise(body) if not line)
    assert "--objective {causal,masked,seq2seq,classify}" in " ".join(" ".join(lines).split())
    assert "or a share of a GPU, e.g. 0.25 (default: 0.9 of its free memory, or --ram)" in " ".join(" ".join(lines).split())


def test_settings_survive_a_trip_through_toml():
    """config.toml of a run reads back into the same settings, odd strings included."""
    argv = ["--batch=4", "--lr=3e-4", "--attention=stored", '--prompt=a "quoted" \\ \n line', "--steps=7", "--dropout=0.1"]
    values, _ = scan(argv, TABLE)
    settings = build(TrainSettings(), values, TABLE)
    back = build(TrainSettings(), from_toml(to_toml(settings), "x.toml", TABLE)[0], TABLE)
    assert back == settings


@pytest.mark.parametrize("name", ["", *SUFFIXES])
def test_every_written_line_can_be_typed(name):
    """As a flag and in a file, also with a second part; together they give the same settings, and no part has a line of its own."""
    flag, values = TABLE[name.replace("_", "-")] if name else None, {}
    if flag is not None:
        suffix = SUFFIXES[name]
        part = {"int": "3", "float": "0.3"}.get(flag.value_type.__name__, "x@1:2")
        values, _ = scan([f"--{suffix.flag.replace('_', '-')}={suffix.example}{suffix.separator}{part}"], TABLE)
        assert flag.name in values
    settings = build(TrainSettings(), values, TABLE)
    groups = tomllib.loads(to_toml(settings))
    assert not SUFFIXES.keys() & {key for group in groups.values() for key in group}
    words = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for group in groups.values() for key, value in group.items()]
    assert build(TrainSettings(), scan(words, TABLE)[0], TABLE) == settings
    assert build(TrainSettings(), from_toml(to_toml(settings), "x.toml", TABLE)[0], TABLE) == settings


def test_a_part_of_an_unset_flag_is_written_alone():
    """Such as the number of parts of all GPUs, which an environment variable has set: no value of the flag says so."""
    settings = build(TrainSettings(), {"split-gpu": 2}, TABLE)
    assert "split_gpu = 2" in to_toml(settings)
    assert build(TrainSettings(), from_toml(to_toml(settings), "x.toml", TABLE)[0], TABLE) == settings


def test_what_belongs_to_one_start_is_not_written():
    """config.toml of a continued run, and what --dry-run prints, start the same run anew."""
    values, _ = scan(["--resume=runs/a", "--dry-run", "--run-dir=a", "--steps=3"], TABLE)
    written, _ = from_toml(to_toml(build(TrainSettings(), values, TABLE)), "x.toml", TABLE)
    assert not {"resume", "dry-run", "run-dir"} & set(written)
    assert written["steps"] == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [("batch = ", "x.toml is not a TOML file"), ("bach = 3", "unknown key 'bach' in x.toml; did you mean --batch?"), ("batch = [1]", "single value")],
)
def test_a_broken_config_file_is_named(text, words):
    """The file and the key are in the message."""
    with pytest.raises(UsageError) as error:
        from_toml(text, "x.toml", TABLE)
    assert words in str(error.value)


def test_naming_the_model_another_way_forgets_the_weaker_name():
    """--config-path on the command line replaces model = ... of a file, and the other way round; a file of weights names no model."""
    assert merge({"model": "tiny"}, {"init-from": "dir"}) == {"init-from": "dir"}
    assert merge({"model": "tiny"}, {"init-from": "w.safetensors"}) == {"model": "tiny", "init-from": "w.safetensors"}
    assert merge({"model": "tiny", "batch": 2}, {"config-path": "x.json"}) == {"batch": 2, "config-path": "x.json"}
    assert merge({"config-path": "x.json"}, {"model": "gpt2"}) == {"model": "gpt2"}


def test_environment_variables_stand_in_for_flags():
    """NNTASK_NCPU is stronger than its alias; an unknown NNTASK_ variable is pointed out."""
    found = flags_from({"STARPU_NCPU": "1", "NNTASK_NCPU": "2", "NNTASK_RAM": ""})
    assert found == {"ncpu": ("2", "NNTASK_NCPU")}
    assert unknown_variables({"NNTASK_NCPUS": "1", "PATH": ""}) == ["NNTASK_NCPUS is set but nothing reads it; did you mean NNTASK_NCPU?"]


@pytest.mark.parametrize("name", ["FOO", "BATCH", "LR", "STEPS", "MODEL", "SCORE", "SEED", "NONSENSE", "CUDA", "DEBUG", ""])
def test_an_unknown_variable_has_no_unrelated_suggestion(name):
    """The prefix that all have in common does not count; a name that resembles none is answered with the place of the list."""
    assert unknown_variables({f"NNTASK_{name}": "1"}) == [f"NNTASK_{name} is set but nothing reads it; nntask train --help-all lists the variables"]


@pytest.mark.parametrize("variable", [v.name for v in VARIABLES if v.name.startswith("NNTASK_")])
def test_a_slip_in_a_variable_is_recognised(variable):
    """A letter too many or too few, in each of them."""
    for slip in (f"{variable}S", variable[:-1]):
        (sentence,) = unknown_variables({slip: "1"})
        assert sentence == f"{slip} is set but nothing reads it; did you mean {variable}?"


@pytest.mark.parametrize("command", ["train", "plan"])
def test_the_help_lists_the_variables_that_override_a_file(command, capsys):
    """With their flags, after the other flags of --help-all; --help says where."""
    with pytest.raises(SystemExit):
        main([command, "--help-all"])
    shown = " ".join(capsys.readouterr().out.split())
    listed = shown.rpartition("Environment variables that override a TOML file: ")[2]
    assert re.findall(r"([A-Z]+_[A-Z_]+) \(", listed) == [v.name for v in VARIABLES if v.flag]
    assert set(re.findall(r"--([a-z-]+)\)", listed)) <= set(TABLE) - {name.replace("_", "-") for name in SUFFIXES}
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "the command line overrides it, and so do the environment variables that --help-all lists" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("12", 12), ("1KiB", 1024), ("2GiB", 2 << 30), ("1.5 MB", 1_500_000), ("3gb", 3_000_000_000), ("7B", 7), ("8,392,704 B", 8_392_704)],
)
def test_sizes(text, nbytes):
    """Binary and decimal units, in any case."""
    assert parse_size(text, "--ram") == nbytes


@pytest.mark.parametrize(
    ("text", "example"), [("70M", "70MiB"), ("1.5g", "1.5GiB"), ("7Kb1", "2GiB"), ("64k", "64KiB"), ("2T", "2TiB"), ("12XB", "12GiB")]
)
def test_the_example_is_what_was_meant(text, example):
    """The first letter of a unit says which one."""
    with pytest.raises(UsageError, match=f"for example {example}$"):
        parse_size(text, "--ram")


@pytest.mark.parametrize("text", ["12XB", "", "GiB", "-1GiB", "0", "1e9", "1,5GiB", "8,392.7 B"])
def test_sizes_that_are_none(text):
    """The message names the flag and gives an example."""
    with pytest.raises(UsageError, match=r"--ram must be .*for example"):
        parse_size(text, "--ram")


@pytest.mark.parametrize("text", ["55GB/s", "55 GB", " 55gB /s ", "55,000,000,000 B/s", "55000000000B"])
def test_rates(text):
    """Sizes with a unit, with or without the /s."""
    assert parse_rate(text, "--link") == 55e9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fast", "; for example 55GB/s"),
        ("55GB/h", "; for example 55GB/s"),
        ("25", ", which has no unit; for example 25GB/s"),
        ("25/s", ", which has no unit; for example 25GB/s"),
        ("25Gb/s", "; bits? 25 Gb/s are 3.125GB/s"),
        ("25 Gbit/s", "; bits? 25 Gb/s are 3.125GB/s"),
        ("100mbps", "; bits? 100 mb/s are 12.5MB/s"),
        ("1,000Kib", "; bits? 1000 Kib/s are 125KiB/s"),
        ("8b/s", "; bits? 8 b/s are 1B/s"),
        ("800 bps", "; bits? 800 b/s are 100B/s"),
        ("4b", "; for example 55GB/s"),
        ("0Gb/s", "; for example 55GB/s"),
        ("0", ", which has no unit; for example 55GB/s"),
        ("0/s", ", which has no unit; for example 55GB/s"),
        ("0GB/s", "; for example 55GB/s"),
        ("9" * 400, ", which has no unit; for example 55GB/s"),
    ],
)
def test_rates_that_are_none(text, words):
    """A rate says its unit, in bytes; what is said of bits is a rate."""
    with pytest.raises(UsageError) as error:
        parse_rate(text, "--link")
    assert str(error.value) == f"--link must be bytes per second, got {text!r}{words}"
    assert parse_rate(words.split()[-1], "--link") > 0


def test_numbers_for_people():
    """Sizes, counts and durations are short."""
    assert [format_size(n) for n in (12, 2048, 3 << 30)] == ["12 B", "2 KiB", "3 GiB"]
    assert [format_count(n) for n in (12, 2000, 1_300_000)] == ["12", "2.0k", "1.3M"]
    assert [format_duration(n) for n in (12, 96, 7500)] == ["12s", "1m36s", "2h05m"]
