"""Masked tokens: which are chosen, what becomes of them, and that nothing but seed, epoch and number decides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.objective_data import TEXTS, Learner, opened, tokenizer_in

from nntask.config.settings import DataSettings
from nntask.data import BatchStream, TokenFile
from nntask.data.draws import uniforms
from nntask.data.masking import MaskedWindows, Masking
from nntask.data.sampler import in_order
from nntask.errors import DataError

SPECIAL = np.array([0, 1, 2], np.int32)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNTASK_CACHE", str(tmp_path / "cache"))


def windows(tmp_path: Path, count: int = 4000, length: int = 100) -> MaskedWindows:
    """Sequences of random ids, one in five of them special."""
    draw = np.random.default_rng(0)
    ids = np.where(draw.random(count) < 0.2, draw.integers(0, 3, count), draw.integers(3, 50, count))
    path = tmp_path / "t.bin"
    path.write_bytes(ids.astype("<u2").tobytes())
    return MaskedWindows(TokenFile(path, vocab_size=50), length, Masking(2, SPECIAL, 50, 0.15, 7))


def test_numbers_are_uniform_and_depend_on_everything() -> None:
    """Another seed, epoch, sequence or purpose gives others; a longer sequence begins with the same."""
    base = uniforms(1, 2, 3, 4, 10000)
    assert np.histogram(base, 10, (0, 1))[0] == pytest.approx([1000] * 10, abs=130)
    assert (uniforms(1, 2, 3, 4, 10) == base[:10]).all()
    for other in ((0, 2, 3, 4), (1, -1, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5)):
        assert abs(np.corrcoef(uniforms(*other, 10000), base)[0, 1]) < 0.05


def test_eight_in_ten_are_masked_one_replaced_one_kept(tmp_path: Path) -> None:
    """About 15 % of what is not special is a target; targets are the tokens that were there, and nothing else has changed."""
    examples = windows(tmp_path, 40000)
    ids = np.stack([examples.file.window(at * 100, 100) for at in range(400)])
    found = examples.arrays(np.arange(400), 0)
    tokens, targets = found["tokens"], found["targets"]
    chosen = targets >= 0
    assert (targets[chosen] == ids[chosen]).all()
    assert (tokens[~chosen] == ids[~chosen]).all()
    assert not np.isin(ids[chosen], SPECIAL).any()
    ordinary = ~np.isin(ids, SPECIAL)
    assert chosen.sum() / ordinary.sum() == pytest.approx(0.15, abs=0.01)
    assert (tokens[chosen] == 2).mean() == pytest.approx(0.8 + 0.1 / 50, abs=0.02)
    assert (tokens[chosen] == ids[chosen]).mean() == pytest.approx(0.1 + 0.1 / 50, abs=0.02)


def test_masks_follow_from_the_place_alone(tmp_path: Path) -> None:
    """A stream that goes on at a cursor, and nodes with some of the rows, see the same masks; another epoch has others, validation never."""
    examples = windows(tmp_path)
    whole = BatchStream(examples, 8, seed=3)
    batches = [whole.next() for _ in range(7)]
    rest = BatchStream(examples, 8, seed=3, cursor=batches[4].begin)
    node = BatchStream(examples, 8, seed=3, rows=[2, 5])
    for batch in batches[4:]:
        again = rest.next()
        assert all((again.arrays[name] == array).all() for name, array in batch.arrays.items())
    for batch in batches:
        rows = node.next()
        assert rows.begin == batch.begin
        assert (rows.tokens == batch.tokens[[2, 5]]).all()
        assert rows.arrays["factor"] == batch.arrays["factor"] == np.float32(1 / (batch.targets >= 0).sum())
    assert len(BatchStream(examples, 8, seed=3, rows=()).next()) == 0
    assert (examples.arrays(np.arange(8), 0)["targets"] != examples.arrays(np.arange(8), 1)["targets"]).any()
    first, second = (in_order(examples, 8, 2) for _ in range(2))
    assert all((one.tokens == two.tokens).all() for one, two in zip(first, second, strict=True))


def test_the_mask_is_the_tokenizers(tmp_path: Path) -> None:
    """A tokenizer with a mask is used with texts and with the token ids that it made; one without is an error, and a trained one has its own."""
    words = sorted({word for text in TEXTS for word in text.split()})
    place = tokenizer_in(tmp_path / "tok", words)
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    config, text = Learner("masked"), {"dataset": "text", "dataset_path": str(tmp_path / "text.txt")}
    dataset = opened(config, DataSettings(**text, tokenizer_path=str(place)))
    assert 4 in BatchStream(dataset.examples(0), 4, seed=0).next().tokens
    ids = dataset.train.window(0, dataset.train.num_tokens)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "ids").mkdir(exist_ok=True)
        (tmp_path / "ids" / name).write_text((place / name).read_text())
    (tmp_path / "ids" / "train.bin").write_bytes(ids.astype("<u2").tobytes())
    again = opened(config, DataSettings(dataset="train.bin", dataset_path=str(tmp_path / "ids")))
    assert (again.examples(0).arrays(np.arange(3), 0)["tokens"] == dataset.examples(0).arrays(np.arange(3), 0)["tokens"]).all()
    with pytest.raises(DataError, match="the tokenizer of the data has none"):
        opened(config, DataSettings(**text, tokenizer="bytes")).examples(0)
    (tmp_path / "ids" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="is not known"):
        opened(config, DataSettings(dataset="train.bin", dataset_path=str(tmp_path / "ids"))).examples(0)
    trained = opened(config, DataSettings(**text))
    assert trained.tokenizer is not None
    assert trained.tokenizer.special.mask == 1
    assert opened(config, DataSettings(**text, objective="causal")).tokenizer.special.mask is None
