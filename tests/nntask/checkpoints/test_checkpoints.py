"""Checkpoints: round trips, refusals, and what a kill or a full disk leaves behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.checkpoints import RUNTIME, save_step, tensor
from support.commands import rewrite_state
from support.deadline import DEADLINE

from nntask.checkpoints.store import find_checkpoint, save_checkpoint, step_directories
from nntask.data.tokenizer import train_bpe
from nntask.errors import DataError, Diverged, StorageError, UsageError
from nntask.io.safetensors_file import load_tensors, save_tensors
from nntask.io.sealed_json import sealed
from tiles import TileTensor

TESTS = Path(__file__).resolve().parents[2]
FILES = ("model.safetensors", "optimizer.safetensors")


def test_ragged_tensors_round_trip_and_safetensors_reads_them(tmp_path):
    """What is written is a safetensors file, whatever the tiling, and comes back bit by bit into another tiling."""
    tensors = {"a": tensor((7, 5), (3, 2)), "b": tensor((9,), (4,)), "c": tensor((4, 6, 5), (3, 4, 2), ml_dtypes.bfloat16)}
    path = tmp_path / "x.safetensors"
    save_tensors(path, tensors)
    theirs = load_file(path)
    assert all((theirs[name] == t.read()).all() for name, t in tensors.items())
    others = {name: TileTensor(RUNTIME, t.shape, [2] * len(t.shape), t.dtype) for name, t in tensors.items()}
    load_tensors(path, others)
    assert all((others[name].read() == t.read()).all() for name, t in tensors.items())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_weights_can_be_stored_narrow_and_loaded_wide(tmp_path, dtype):
    """fp16 and bf16 files load into fp32 unless exact types are asked for."""
    wide = tensor((3, 4), (2, 3))
    save_tensors(tmp_path / "x.safetensors", {"w": wide}, dtype=np.dtype(dtype))
    back = wide.like()
    load_tensors(tmp_path / "x.safetensors", {"w": back}, exact=False)
    assert (back.read() == wide.read().astype(dtype).astype(np.float32)).all()
    with pytest.raises(DataError, match="element type"):
        load_tensors(tmp_path / "x.safetensors", {"w": back})


def test_files_of_the_safetensors_package_load(tmp_path):
    """The door works in the other direction too."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    save_file({"w": values}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    back = TileTensor(RUNTIME, (3, 4), (2, 2), np.float32)
    load_tensors(tmp_path / "x.safetensors", {"w": back})
    assert (back.read() == values).all()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"v": np.zeros((3, 4), np.float32)}, ["no tensor w", "(3, 4)"]),
        ({"w": np.zeros((4, 3), np.float32)}, ["w in", "(4, 3)", "(3, 4)"]),
        ({"w": np.zeros((3, 4), np.int32)}, ["element type I32", "F32"]),
        ({"w": np.zeros((3, 4), np.float32), "x": np.zeros(2, np.float32)}, ["a tensor x of shape (2,)"]),
    ],
)
def test_misfits_name_the_tensor_and_both_shapes(tmp_path, tensors, words):
    """Missing, misshapen, mistyped and surplus tensors are refused before any tile is written."""
    save_file(tensors, tmp_path / "x.safetensors")
    target = tensor((3, 4), (2, 2))
    before = target.read()
    with pytest.raises(DataError) as error:
        load_tensors(tmp_path / "x.safetensors", {"w": target})
    assert all(word in str(error.value) for word in words)
    assert (target.read() == before).all()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a whole safetensors file"),
        (b"\xff" * 40, "header claims"),
        (b"\x08\0\0\0\0\0\0\0not json", "cannot be parsed"),
        (b"PK\x03\x04" + b"\0" * 50, "torch pickle"),
        (b"\x80\x02}q\x00." + b"\0" * 20, "torch pickle"),
    ],
)
def test_corrupt_files_and_pickles_are_refused(tmp_path, content, words):
    """Garbage is named as such; a torch pickle comes with the command that converts it."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as error:
        load_tensors(path, {})
    assert "pickle" not in words or "weights_only=True" in str(error.value)


def test_a_truncated_file_is_refused(tmp_path):
    """A file that a copy cut short is not loaded."""
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"w": tensor((8, 8), (4, 4))})
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="not a whole safetensors file"):
        load_tensors(path, {"w": tensor((8, 8), (4, 4))})


def test_only_the_newest_are_kept_and_latest_points_to_the_last(tmp_path):
    """Of five checkpoints two remain; the run, `latest` and the directory itself all lead to the newest."""
    for step in (5, 10, 15, 20, 25):
        path = save_step(tmp_path, step, keep=2)
    assert [p.name for p in step_directories(tmp_path)] == ["step-000020", "step-000025"]
    assert os.readlink(tmp_path / "latest") == "checkpoints/step-000025"
    assert {find_checkpoint(p).step for p in (tmp_path, tmp_path / "latest", path)} == {25}


def test_a_run_without_checkpoints_says_so(tmp_path):
    """The message says what to give instead."""
    with pytest.raises(DataError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(DataError, match="holds a run that saved no checkpoint, so there is nothing to go on from; wait for one if"):
        find_checkpoint(tmp_path)
    with pytest.raises(DataError, match="typo does not exist; give a run directory"):
        find_checkpoint(tmp_path / "typo")


def test_a_broken_state_is_refused(tmp_path):
    """state.json must be JSON with the fields of a checkpoint."""
    path = save_step(tmp_path, 1)
    (path / "state.json").write_text('{"format": 1, "step"')
    with pytest.raises(DataError, match="not the state of a checkpoint"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": "abc"}, 'step in {file} must be a whole number, got "abc"'),
        ({"step": True}, "step in {file} must be a whole number, got true"),
        ({"step": -1}, "step in {file} must be a whole number, got -1"),
        ({"cursor": [1]}, "cursor in {file} must be two whole numbers, got [1]"),
        ({"cursor": [0, 1.5]}, "cursor in {file} must be two whole numbers"),
        ({"settings": []}, "settings in {file} must be an object of objects, got []"),
        ({"settings": {"tiling": 3}}, "settings in {file} must be an object of objects"),
        ({"model": "gpt2"}, "model in {file} must be an object"),
        ({"checksums": {"model.safetensors": "abc"}}, "checksums in {file} must be an object of whole numbers"),
        ({"format": "new"}, "{file} has format new"),
    ],
)
def test_a_state_of_other_types_is_refused(tmp_path, change, words):
    """File and key are named."""
    file = save_step(tmp_path, 1) / "state.json"
    rewrite_state(file, lambda state: state.update(change))
    with pytest.raises(DataError) as error:
        find_checkpoint(tmp_path)
    assert words.format(file=file) in str(error.value)


def test_a_state_that_lacks_a_key_or_is_no_object_is_refused(tmp_path):
    """The key that is missing is named."""
    file = save_step(tmp_path, 1) / "state.json"
    for written in ('{"format": 1, "step": 1, "model": {}}', sealed({"format": 2, "step": 1, "model": {}})):
        file.write_text(written)
        with pytest.raises(DataError, match="lacks cursor"):
            find_checkpoint(tmp_path)
    file.write_text("[1]")
    with pytest.raises(DataError, match="must be a JSON object"):
        find_checkpoint(tmp_path)


def test_the_model_in_a_state_is_checked_when_asked_for(tmp_path):
    """A width of the wrong type is an error of the checkpoint, not of a flag."""
    state = {"step": 1, "cursor": [0, 0], "model": {"vocab_size": 1, "n_positions": 1, "n_embd": "12", "n_layer": 1, "n_head": 1}}
    save_checkpoint(tmp_path, state, {}, {})
    with pytest.raises(DataError, match=r"n_embd in model in .*state\.json must be a whole number"):
        _ = find_checkpoint(tmp_path).config


def test_a_model_without_tiles_is_named(tmp_path):
    """Its config stands beside the weights, and what asks for a config of tiles hears what the checkpoint is for."""
    config = {"model_type": "mamba", "vocab_size": 30}
    path = save_checkpoint(tmp_path, {"step": 1, "cursor": [0, 0], "model": config}, {}, {}, config=config)
    assert json.loads((path / "config.json").read_text()) == config
    with pytest.raises(DataError, match="holds a mamba, for which nntask has no tiles: nntask train and plan take it"):
        _ = find_checkpoint(tmp_path).config


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("where", ["model", "optimizer"])
def test_what_is_not_finite_is_never_saved(tmp_path, value, dtype, where):
    """Exit code 5, the tensor named, the checkpoint before untouched and no debris."""
    save_step(tmp_path, 5)
    bad = tensor((7, 3), (2, 2), dtype)
    values = bad.read()
    values[6, 2] = value
    bad.write(values)
    tensors = {"model": {"w": tensor((4, 3), (2, 2))}, "optimizer": {"m": tensor((4, 3), (2, 2))}}
    tensors[where]["bad"] = bad
    with pytest.raises(Diverged, match="after step 10, bad holds values that are not finite, and nothing of it was saved; lower --lr"):
        save_checkpoint(tmp_path, {"step": 10, "cursor": [0, 0], "model": {}}, tensors["model"], tensors["optimizer"], keep=1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000005"]
    assert find_checkpoint(tmp_path).step == 5


def test_values_too_large_for_the_type_they_are_stored_in_are_refused(tmp_path):
    """fp16 ends at 65504; what was at the path before stays."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"before")
    wide = tensor((3, 4), (2, 3))
    wide.write(np.full((3, 4), 1e5, np.float32))
    with np.errstate(over="ignore"), pytest.raises(UsageError, match="w holds values too large for float16"):
        save_tensors(path, {"w": wide}, dtype=np.dtype(np.float16), finite=True)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x.safetensors", b"before")]


KILLED = """
import os, signal, sys
from pathlib import Path
from support.checkpoints import save_step
def save(run, count):
    seen = 0
    def hook(event, args):
        nonlocal seen
        if event in ("os.rename", "os.symlink", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "open"):
            seen += 1
            if seen == count:
                os.kill(os.getpid(), signal.SIGKILL)
    save_step(run, 5)
    sys.addaudithook(hook)
    save_step(run, 10, keep=1)
for count in map(int, sys.argv[2:]):
    child = os.fork()
    if not child:
        save(Path(sys.argv[1]) / str(count), count)
        os._exit(0)
    print(count, os.waitpid(child, 0)[1])
"""
COUNTS = [1, 5, 9, 13, 17, 21, 25, 29, 33, 37]


def python(script: str, *argv: object) -> subprocess.CompletedProcess[str]:
    """Run a script that may import what tests share."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    command = [sys.executable, "-c", script, *map(str, argv)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Run directories by when the process was killed: before which file operation of its second save. And how each process ended."""
    folder = tmp_path_factory.mktemp("killed")
    done = python(KILLED, folder, *COUNTS)
    assert done.returncode == 0, done.stderr
    return folder, dict(tuple(map(int, line.split())) for line in done.stdout.splitlines())


@pytest.mark.parametrize("count", COUNTS)
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(killed, count):
    """SIGKILL before the n-th file operation of a save: the newest checkpoint loads, and the next save works."""
    run, ended = killed[0] / str(count), killed[1][count]
    assert ended in (0, signal.SIGKILL)
    assert ended or count > 30, "the save has more operations than this"
    found = find_checkpoint(run)
    assert found.step in (5, 10)
    found.load({"w": tensor((4, 3), (2, 2))}, {"m": tensor((4, 3), (2, 2))})
    save_step(run, 15, keep=1)
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000015"]


FULL = """
import resource, signal, sys
from pathlib import Path
from support.checkpoints import save_step
from nntask.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
try:
    save_step(Path(sys.argv[1]), 10)
except StorageError as error:
    print(error)
    raise SystemExit(error.exit_code)
"""


@pytest.mark.parametrize("limit", [0, 60, 100])
def test_a_disk_without_room_keeps_the_previous_checkpoint(tmp_path, limit):
    """A write that fails for lack of room exits 6, names the checkpoint that is safe, and leaves no debris."""
    save_step(tmp_path, 5)
    done = python(FULL, tmp_path, limit)
    assert done.returncode == 6, done.stderr
    assert "step-000005 is safe" in done.stdout
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000005"]
    assert find_checkpoint(tmp_path).step == 5


def test_state_keeps_what_it_is_given(tmp_path):
    """state.json is plain JSON that a person can read."""
    path = save_step(tmp_path, 7)
    state = json.loads((path / "state.json").read_text())
    assert state.pop("checksums") == {name: zlib.crc32((path / name).read_bytes()) for name in FILES}
    assert type(state.pop("crc32")) is int
    assert state == {"format": 2, "step": 7, "cursor": [0, 7], "model": {}}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: (path / "optimizer.safetensors").unlink(), "{path} is not a whole checkpoint: it lacks optimizer.safetensors; "),
        (lambda path: os.truncate(path / "model.safetensors", 9), "{path}/model.safetensors is corrupt: its checksum is "),
        (lambda path: os.truncate(path / "state.json", 0), "{path}/state.json is not the state of a checkpoint: it is empty; "),
        (lambda path: os.truncate(path / "state.json", 9), "{path}/state.json is not the state of a checkpoint: it is not whole JSON, "),
        (lambda path: (path / "state.json").unlink(), "cannot read {path}/state.json: No such file or directory; "),
    ],
)
def test_a_checkpoint_that_is_not_whole(tmp_path, monkeypatch, spoil, words):
    """One sentence says what is wrong with it, and which checkpoint is the one before it; of a first one, nothing of the kind."""
    monkeypatch.chdir(tmp_path)
    for step, end in ((5, "use an older one"), (10, "use an older one, checkpoints/step-000005"), (15, "use an older one, checkpoints/step-000010")):
        path = save_step(tmp_path, step)
        spoil(path)
        with pytest.raises(DataError) as error:
            find_checkpoint(tmp_path).load({"w": tensor((4, 3), (2, 2))}, {"m": tensor((4, 3), (2, 2))})
        assert str(error.value).startswith(words.format(path=path))
        assert str(error.value).endswith(f"; copy it again, or move this checkpoint away and {end}")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("position", [-1, -20])
def test_a_file_that_changed_is_not_loaded(tmp_path, name, position):
    """One flipped bit in any tensor is found and the file is named; what a checkpoint of the first format holds is loaded as it is."""
    path = save_step(tmp_path, 7)
    content = bytearray((path / name).read_bytes())
    content[position] ^= 1
    (path / name).write_bytes(content)
    tensors = {"w": tensor((4, 3), (2, 2))}, {"m": tensor((4, 3), (2, 2))}
    with pytest.raises(DataError) as error:
        find_checkpoint(tmp_path).load(*tensors)
    assert f"{path / name} is corrupt: its checksum is " in str(error.value)
    assert "use an older one" in str(error.value)
    if name == "optimizer.safetensors":
        find_checkpoint(tmp_path).load(tensors[0])
    state = json.loads((path / "state.json").read_text())
    del state["checksums"], state["crc32"]
    (path / "state.json").write_text(json.dumps({**state, "format": 1}))
    find_checkpoint(tmp_path).load(*tensors)


@pytest.mark.parametrize("name", ["state.json", "tokenizer.json"])
def test_no_bit_of_a_small_file_may_change(tmp_path, name):
    """Whichever bit of the state or of the tokenizer is flipped, the checkpoint is refused, or is the same."""
    state = {"step": 1, "cursor": [0, 7], "model": {"n_layer": 6}, "settings": {"optimizer": {"lr": 0.5}}}
    file = save_checkpoint(tmp_path, state, {}, {}, tokenizer=train_bpe(["some text and some more of it"], 260)) / name
    whole, before = file.read_bytes(), find_checkpoint(tmp_path).state
    flips = [(place, bit) for place in range(0, len(whole), max(1, len(whole) // 300)) for bit in range(8)]
    for place, bit in flips:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
        with contextlib.suppress(DataError):
            assert find_checkpoint(tmp_path).state == before
            assert name == "state.json"  # the space between its words has no meaning


def test_a_directory_of_another_step_is_never_taken_for_one(tmp_path):
    """A copy of step 6 with the name of step 8 is refused by name; a run that comes to step 8 says so and saves nothing over it."""
    shutil.copytree(save_step(tmp_path, 6), tmp_path / "checkpoints" / "step-000008")
    with pytest.raises(DataError, match="step-000008 holds the checkpoint of step 6, not of the step in its name"):
        find_checkpoint(tmp_path)
    with pytest.raises(StorageError, match=r"could not save the checkpoint of step 8: .*step-000008 is there and is not it"):
        save_step(tmp_path, 8)


def test_a_length_that_begins_like_a_pickle_is_a_length(tmp_path):
    """The first two bytes of a file whose header has 640 bytes are those of a pickle."""
    path = tmp_path / "x.safetensors"
    for extra in range(640):
        save_tensors(path, {"w" * (1 + extra): tensor((8, 8), (4, 4))})
        if path.read_bytes()[:2] == b"\x80\x02":
            break
    assert path.read_bytes()[:3] == b"\x80\x02\0"
    load_tensors(path, {"w" * (1 + extra): tensor((8, 8), (4, 4))})
