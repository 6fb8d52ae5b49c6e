"""The command that NNTile's users paste: it runs where its data are, and says in one line what is missing where they are not."""

import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadline import DEADLINE

from nntask.data.tokenizer import train_bpe

ROOT = Path(__file__).parents[3]
COMMAND = """examples/gpt2_custom_training.py --config-path=examples/gpt2_default_config.json --tokenizer=gpt2
 --tokenizer-path=data --batch=1024 --minibatch=4 --minibatch-tile=4 --seq-tile=1024 --embd-tile=768 --inner-tile=3072 --head-tile=12 --restrict=cuda
 --flashattention --nforward=10 --nforward-warmup=10 --nbackward=10 --nbackward-warmup=10 --dataset=WikiText-103 --dataset-path=data
 --dataset-select=40000 --optimizer=fusedadamw --optimizer-eps=1e-8 --weight-decay=0.1 --loss-reduction=mean --lr=3e-4 --start-lr=0
 --full-lr-iter=10 --nepochs=1 --nepochs-warmup=1"""


def run(here: Path, *, without: str = "", more: tuple[str, ...] = (), **environment: str) -> tuple[int, str, str]:
    """Run the command; exit code, output and errors."""
    words = [word.replace("examples/", f"{ROOT}/examples/") for word in shlex.split(COMMAND) if word != without]
    variables = {"PYTHONPATH": str(ROOT), "NNTASK_CACHE": str(here / "cache"), "CUDA_VISIBLE_DEVICES": "0", "STARPU_NCPU": "2", **environment}
    done = subprocess.run(
        [sys.executable, *words, *more], cwd=here, env={**os.environ, **variables}, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_without_a_gpu(tmp_path):
    """As printed, on a machine without one."""
    code, _, err = run(tmp_path)
    assert code == 2
    assert err.startswith("nntask: --restrict=cuda needs a GPU")
    assert "drop --restrict=cuda" in err
    assert err.count("\n") == 1


def test_without_data(tmp_path):
    """No data, and a hub that has no name: one line, with the command for a machine that reaches it."""
    code, _, err = run(tmp_path, without="--restrict=cuda", HF_ENDPOINT="http://hub.invalid", HF_HUB_OFFLINE="0")
    assert (code, err.count("\n"), "Traceback" in err) == (4, 1, False)
    assert "nntask data prepare --dataset WikiText-103 --dataset-path data --tokenizer gpt2 --tokenizer-path data --dataset-select 40000" in err


def lay_data(here: Path, num_rows: int = 2000) -> None:
    """WikiText as one of the Hub's files, and a tokenizer, in the directory `data`."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(500)]
    rows = [" ".join(rng.choices(words, k=40)) + "\n" for _ in range(num_rows)]
    (here / "data").mkdir()
    pq.write_table(pa.table({"text": rows}), here / "data" / "train-00000-of-00001.parquet")
    train_bpe(rows[:500], 600).save(here / "data")


def test_with_data(tmp_path):
    """Its data in place, as the Hub's files: everything is read and checked. A dry run, and 8 sequences a step instead of 1024, to take seconds."""
    lay_data(tmp_path)
    code, out, err = run(tmp_path, without="--restrict=cuda", more=("--batch=8", "--dry-run"), HF_HUB_OFFLINE="1")
    assert (code, err) == (0, "")
    assert 'dataset = "WikiText-103"' in out
    assert "dataset_select = 40000" in out


@pytest.mark.long
def test_it_trains(tmp_path):
    """The model and the tiles as printed, in fewer loops and 2 steps of 8 sequences: the lines that NNTile's users know, in their order."""
    lay_data(tmp_path)
    few = ("--batch=8", "--steps=2", "--nforward=1", "--nforward-warmup=0", "--nbackward=1", "--nbackward-warmup=0", "--sample-tokens=0")
    code, out, err = run(tmp_path, without="--restrict=cuda", more=few, HF_HUB_OFFLINE="1")
    assert (code, err) == (0, "")
    lines = (
        "forward time: ", "forward throughput (tokens/sec):  ", "forward performance: ", "backward time: ", "backward throughput (tokens/sec):  ",
        "backward performance: ", "Total train batches: ", "Total train sequences: ", "Total train tokens: ", "Training time: ",
        "Training throughput tokens/sec: ", "Training performance: ", "Loss on the last batch: ",
    )  # fmt: skip
    places = [out.index(line) for line in lines]
    assert places == sorted(places)


@pytest.mark.long
def test_the_batch_as_printed(tmp_path):
    """1024 sequences a step, in 256 minibatches, are planned as printed; only --dry-run is added."""
    lay_data(tmp_path, 20_000)
    code, out, err = run(tmp_path, without="--restrict=cuda", more=("--dry-run",), HF_HUB_OFFLINE="1")
    assert (code, err) == (0, "")
    assert "batch = 1024" in out
