"""``nntask generate`` and ``nntask perplexity``: transformers' texts and losses on their directories, batches of prompts, memory, plain refusals."""

import json
import math
import re
import tempfile
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from support.commands import refuse
from support.model_directories import TEXT, write_model
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel

from nntask.data import load_tokenizer
from nntask.data.tokenizer import BpeTokenizer, ByteTokenizer, train_bpe
from nntask.inference.pretrained import ModelSource, TextIds
from nntask.io.units import flag_size, parse_size
from nntask.models.gpt2 import GPT2Config
from wrappers.cli import main
from wrappers.cli.commands import perplexity
from wrappers.cli.commands.generate import TextSettings, _Text, prompts_of

CONFIG = GPT2Config(vocab_size=300, n_positions=48, n_embd=24, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
DATA = ["--dataset=text", "--dataset-path=text.txt"]
TRAIN = ["train", "--config-path=small.json", *DATA, "--batch=2", "--steps=1", "--lr=1e-3", "--ncpu=2", "--sample-tokens=0"]
PROMPTS = ["some words", "and", "some more words, and some"]
GREEDY = ["--temperature=0", "--max-new-tokens=12"]


def write_llama(path):
    """A LLaMA with grouped queries whose tokenizer puts an id before each text, as Llama's does; returns transformers' model."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    ids = {"vocab_size": 300, "bos_token_id": 7, "eos_token_id": [299, 298]}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ids, max_position_embeddings=48, initializer_range=0.2)).eval()
    theirs.save_pretrained(path)
    inner = train_bpe([TEXT], 290).inner
    token = inner.id_to_token(7)
    inner.post_processor = processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, 7)])
    inner.save(str(path / "tokenizer.json"))
    return theirs


@pytest.fixture
def here(folder):
    """Directories of both families, a config, text, prompts."""
    write_model(folder / "gpt2", CONFIG)
    (folder / "text.txt").write_text(TEXT)
    (folder / "small.json").write_text(json.dumps(CONFIG.to_dict()))
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder


def expected(theirs, tokenizer, begin, prompt, count=12, **options):
    """Prompt and greedy continuation, or the best of beams, by transformers."""
    ids = [int(i) for i in tokenizer.encode([prompt])[0]]
    given = torch.tensor([[*begin, *ids]])
    stop = theirs.generation_config.eos_token_id
    new = theirs.generate(given, max_new_tokens=count, do_sample=False, pad_token_id=0, **options)[0, given.shape[1] :].tolist()
    if stop is not None:
        new = [i for i in new if i not in np.atleast_1d(stop)]
    return tokenizer.decode([*ids, *new])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_texts_of_a_directory_are_those_of_transformers(here, capsys, family):
    """One prompt, a file of them, JSON, and no prompt at all: what from_pretrained and generate say."""
    if family == "llama":
        write_llama(here / "llama")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(here / family).eval()
    if family == "gpt2":
        theirs.generation_config.eos_token_id = None
    tokenizer, begin = load_tokenizer(here / family), [7] if family == "llama" else []
    want = [expected(theirs, tokenizer, begin, prompt) for prompt in PROMPTS]
    assert main(["generate", family, f"--prompt={PROMPTS[0]}", *GREEDY]) == 0
    assert capsys.readouterr().out == want[0] + "\n"
    for batch in (1, 2, 8):
        assert main(["generate", family, "--prompt-file=prompts.txt", f"--batch={batch}", *GREEDY]) == 0
        assert capsys.readouterr().out == "".join(f"--- {number}\n{text}\n" for number, text in enumerate(want, 1))
    assert main(["generate", family, "--prompt-file=prompts.txt", "--json", "--no-cache", *GREEDY]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["number"], row["prompt"], row["text"]) for row in rows] == [(n, *pair) for n, pair in enumerate(zip(PROMPTS, want, strict=True), 1)]
    assert all((row["end"], row["tokens"]) == ("length", 12) or row["end"] == "stop" for row in rows)
    if family == "llama":
        assert main(["generate", "llama", *GREEDY]) == 0
        assert capsys.readouterr().out == expected(theirs, tokenizer, [7], "") + "\n"
    else:
        code, err = refuse(capsys, ["generate", "gpt2"])
        assert (code, "bos_token_id" in err) == (2, True)


SEARCHES = [
    ({"num_beams": 4}, ["--num-beams=4"]),
    ({"num_beams": 3, "length_penalty": 2.0, "early_stopping": True}, ["--num-beams=3", "--length-penalty=2", "--early-stopping=true"]),
    ({"num_beams": 2, "repetition_penalty": 1.4}, ["--num-beams=2", "--repetition-penalty=1.4"]),
    ({"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}, ["--repetition-penalty=1.4", "--no-repeat-ngram-size=2"]),
]


def test_searches_of_a_directory_are_those_of_transformers(here, capsys):
    """Beams and penalties, with the stop tokens of the directory; texts of a file side by side, and JSON."""
    theirs, tokenizer = write_llama(here / "llama"), load_tokenizer(here / "llama")
    for options, flags in SEARCHES:
        want = [expected(theirs, tokenizer, [7], prompt, **options) for prompt in PROMPTS]
        assert main(["generate", "llama", "--prompt-file=prompts.txt", "--batch=2", "--json", *GREEDY, *flags]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [row["text"] for row in rows] == want, flags
        assert all((row["end"] == "length") == (row["tokens"] == 12) for row in rows)
    assert main(["generate", "llama", "--prompt-file=prompts.txt", "--no-cache", *GREEDY, *flags]) == 0
    assert capsys.readouterr().out == "".join(f"--- {number}\n{text}\n" for number, text in enumerate(want, 1))


def test_a_run_says_the_same_everywhere(here, capsys):
    """A run and its checkpoint; workers, devices, policies; RAM that holds a part of the weights; bf16; a full context is said."""
    assert main([*TRAIN, "--run-dir=run"]) == 0
    capsys.readouterr()
    argv = ["--prompt-file=prompts.txt", "--seed=5", "--max-new-tokens=20"]
    texts = set()
    machines = (
        ["--ncpu=1", "--sched=eager", "--no-prefetch"],
        ["--ncpu=0", "--sim-gpu=2", "--gpu-memory=130KiB"],
        ["--ram=130KiB", "--disk=tier:1GiB", "--evict=lru"],
    )
    for model, machine in (("run", []), ("run/latest", []), *(("run", machine) for machine in machines)):
        assert main(["generate", model, *argv, *machine]) == 0, machine
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1
    assert texts.pop().count("--- ") == 3
    assert main(["generate", "run", "--dtype=bf16", *argv]) == 0
    assert capsys.readouterr().out.count("--- ") == 3
    ends = {}
    for seed in range(3):
        argv = ["generate", "run", "--prompt=some", "--max-new-tokens=500", "--temperature=3", f"--seed={seed}"]
        assert main([*argv, "--json"]) == 0
        row = json.loads(capsys.readouterr().out)
        assert (row["end"] == "context") == (row["tokens"] == 48 - len(load_tokenizer(here / "run/latest").encode(["some"])[0]))
        assert main(argv) == 0
        found = capsys.readouterr()
        assert found.out == row["text"] + "\n"
        assert ("the model's context of 48 tokens is full" in found.err) == (row["end"] == "context")
        ends[row["end"]] = seed
    assert "context" in ends


@pytest.mark.parametrize("kind", ["bpe", "bytes", "bytes without end", "another's"])
def test_exports_of_a_run_on_plain_texts_say_what_it_says(here, capsys, monkeypatch, kind):
    """Its directory, one with quantised weights' types, a GGUF file, and transformers begin a prompt with the ids of the run, and write its text."""
    inner = train_bpe([TEXT], 290).inner
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    inner.save(str(here / "tokenizer.json"))
    (here / "bytes.json").write_text(json.dumps({**CONFIG.to_dict(), "vocab_size": 256}))
    flags = {"bytes": ["--tokenizer=bytes"], "another's": ["--tokenizer-path=tokenizer.json"]}.get(kind, [])
    flags = [*flags, "--tokenizer=bytes", "--config-path=bytes.json"] if kind == "bytes without end" else flags
    assert main([*TRAIN, *flags, "--steps=8", "--lr=1e-2", "--run-dir=run"]) == 0
    outputs = ["directory", "blocks", *(["file.gguf"] if "bytes" not in kind else [])]
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/proc/none")  # a conversion writes to its target's directory only
        assert main(["export", "run", "directory"]) == 0
        for output in outputs[1:]:
            assert main(["quantize", "run", output, "--type=f32"]) == 0
    capsys.readouterr()
    source = ModelSource.open("run")
    ids = source.text_ids(source.tokenizer()).prompt(PROMPTS[0])
    assert transformers.AutoTokenizer.from_pretrained("directory")(PROMPTS[0]).input_ids == ids
    texts = set()
    for name in ("run", *outputs):
        assert main(["generate", name, "--prompt-file=prompts.txt", *GREEDY]) == 0
        texts.add(capsys.readouterr().out)
        source = ModelSource.open(name)
        assert source.text_ids(source.tokenizer()).prompt(PROMPTS[0]) == ids, name
    assert len(texts) == 1
    theirs = transformers.AutoModelForCausalLM.from_pretrained("directory").eval()
    assert expected(theirs, load_tokenizer("directory"), ids[:1], PROMPTS[0]) == texts.pop().splitlines()[1]


def test_a_text_grows_by_what_its_newest_tokens_add():
    """Characters of several tokens appear whole, together they are the text, and what is decoded each time is short."""

    class Counting(ByteTokenizer):
        most = 0

        def decode(self, ids):
            self.most = max(self.most, len(ids))
            return super().decode(ids)

    prompt, more = "p\N{GRINNING FACE}", "a\N{LATIN SMALL LETTER E WITH ACUTE}\N{GRINNING FACE} b" * 50
    tokenizer = Counting()
    text = _Text(1, prompt, [], TextIds(tokenizer, (), None, frozenset(), 257, adds_special=False))
    pieces = []
    for token in tokenizer.encode([more])[0]:
        text.add([int(token)])
        pieces.append(text.news())
    assert "".join(pieces) == prompt + more
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert tokenizer.most <= 12
    text.add([0xF0])
    assert text.news() == ""
    text.is_complete = True
    assert text.news() == "\N{REPLACEMENT CHARACTER}"


def test_words_that_carry_their_space_keep_it_behind_a_token_that_shows_nothing():
    """A decoder that drops the first space of what it is given, as Llama 2's, sees how words join on, special tokens or not."""
    inner = Tokenizer(WordLevel({"<s>": 0, "\N{LOWER ONE EIGHTH BLOCK}a": 1, "\N{LOWER ONE EIGHTH BLOCK}b": 2}, unk_token="<s>"))
    inner.add_special_tokens(["<s>"])
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    text = _Text(1, "a", [], TextIds(BpeTokenizer(inner), (), None, frozenset(), 3, adds_special=False))
    pieces = [text.news()]
    for token in (2, 0, 0, 1, 2):
        text.add([token])
        pieces.append(text.news())
    assert pieces == ["a", " b", "", "", " a", " b"]


def test_prompts_end_at_newlines_and_nowhere_else(tmp_path):
    """Form feeds and the separators of Unicode are part of a prompt."""
    lines = ["a\x0bb", "c\x0cd\x85e", "f\u2028g"]
    file = tmp_path / "prompts.txt"
    for end in ("", "\n"):
        file.write_text("\n".join(lines) + end, encoding="utf-8")
        assert prompts_of(TextSettings(prompt_file=str(file))) == lines


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_perplexity_is_that_of_transformers(here, capsys, family, monkeypatch):
    """Mean loss over windows that do not overlap, the last one shorter; whatever the batch; a part of the windows; bare token ids. It says on
    stderr how far it is."""
    monkeypatch.setattr(perplexity, "TELL_SECONDS", -1.0)
    if family == "llama":
        write_llama(here / "llama")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(here / family).eval()
    tokenizer = load_tokenizer(here / family)
    ids = [*tokenizer.encode([TEXT])[0].tolist(), tokenizer.end_of_text]
    total = []
    for first in range(0, len(ids) - 1, 20):
        window = torch.tensor([ids[first : first + 21]])
        with torch.no_grad():
            logits = theirs(window[:, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="none").tolist()
    argv = ["perplexity", family, *DATA, "--seq-len=20", "--json"]
    for batch in (1, 4):
        assert main([*argv, f"--batch={batch}"]) == 0
        said = capsys.readouterr()
        found, windows = json.loads(said.out), -(-(len(ids) - 1) // 20)
        told = [int(line.split()[1]) for line in said.err.splitlines() if line.startswith("scored") and line.endswith(f"of {windows} sequences")]
        assert told == list(range(batch, windows, batch))
        assert found["tokens"] == len(ids) - 1
        assert found["loss"] == pytest.approx(np.mean(total), abs=1e-4)
        assert found["perplexity"] == pytest.approx(math.exp(np.mean(total)), rel=1e-3)
        assert (found["split"], found["dataset"], found["seq_len"]) == ("train", "text", 20)
    np.array(ids, "<u2").tofile(here / "train.bin")
    assert main(["perplexity", family, "--dataset=train.bin", "--dataset-path=.", "--seq-len=20", "--dataset-select=2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"train.bin, train: loss {np.mean(total[:40]):.4f} | perplexity ")
    assert "| 40 tokens, 20 at a time" in out
    np.array(ids[:90], "<u2").tofile(here / "val.bin")
    for count, tokens in ((-1, 89), (3, 60)):
        argv = ["--dataset=train.bin", "--dataset-path=.", "--seq-len=20", f"--dataset-select={count}", "--json"]
        assert main(["perplexity", family, *argv]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["split"], found["tokens"]) == ("validation", tokens)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["generate", "nowhere"], 4, "nowhere does not exist"),
        (["generate", "cache"], 4, "holds no checkpoint and no model"),
        (["perplexity", "cache"], 4, "holds no checkpoint and no model"),
        (["generate", "gpt2", f"--prompt={'words ' * 60}"], 2, "more than the model's context of 48; shorten it"),
        (["generate", "gpt2", "--prompt-file=none.txt"], 4, "none.txt cannot be read"),
        (["generate", "gpt2", "--prompt-file=empty.txt"], 4, "empty.txt is empty; write one prompt a line"),
        (["generate", "gpt2", "--prompt-file=gap.txt"], 4, "line 2 of --prompt-file gap.txt is empty"),
        (["generate", "gpt2", "--prompt-file=gpt2/model.safetensors"], 4, "is not text in UTF-8"),
        (["generate", "gpt2", "--prompt-file=prompts.txt", "--prompt=a"], 2, "both say how texts begin"),
        (["generate", "gpt2", "--prompt=a", "--batch=0"], 2, "--batch must be at least 1"),
        (["generate", "gpt2", "--prompt=a", "--num-beams=0"], 2, "--num-beams must be at least 1, got 0; the nearest legal value is 1"),
        (["generate", "gpt2", "--prompt=a", "--num-beams=2"], 2, "searches and draws nothing, and --temperature is 0.8; add --temperature 0"),
        (["generate", "gpt2", "--prompt=a", "--early-stopping=never"], 2, "--num-beams is 1; raise it, or drop --early-stopping"),
        (["generate", "gpt2", "--prompt=a", "--length-penalty=2"], 2, "--num-beams is 1; raise it, or drop --length-penalty"),
        (["generate", "gpt2", "--prompt=a", "--length-penalty=nan"], 2, "--length-penalty must be from -5 to 5, got nan"),
        (["generate", "gpt2", "--prompt=a", "--repetition-penalty=0"], 2, "--repetition-penalty must be above 0, got 0.0"),
        (["generate", "gpt2", "--prompt=a", "--no-repeat-ngram-size=-1"], 2, "--no-repeat-ngram-size must be 0 or more, got -1"),
        (["generate", "huge", "--prompt=a", "--num-beams=2", "--temperature=0"], 5, "the scores of the next token must be finite"),
        (["generate", "gpt2", "--prompt=a", "--ncpu=0"], 2, "--ncpu 0 needs a device"),
        (["generate", "gpt2", "--prompt=a", "--gpu-memory=1MB"], 2, "add --sim-gpu 1"),
        (["generate", "gpt2", "--prompt=a", "--tokenizer-path=gpt2"], 2, "has its own; drop it"),
        (["generate", "gpt2", "--prompt=a", "--ram=30KiB"], 3, "; use --ram "),
        (["perplexity", "gpt2", "--dataset=text"], 2, "needs --dataset-path"),
        (["perplexity", "gpt2", "--dataset=text", "--dataset-path=text.txt", "--split=validation"], 2, "needs validation data"),
        (["perplexity", "gpt2", "--dataset=text", "--dataset-path=text.txt", "--seq-len=49"], 2, "--seq-len must be at most n_positions = 48"),
        (["perplexity", "gpt2", *DATA, "--val-path=text.txt", "--dataset-select=1"], 2, "text.txt is scored whole; drop it"),
        (["perplexity", "gpt2", "--dataset=WikiText-103", "--dataset-select=1"], 2, "is scored whole; drop it, or add --split train"),
        (["generate", "huge", "--prompt=a"], 5, "the scores of the next token must be finite"),
        (["perplexity", "huge", *DATA], 5, "the loss of "),
        (["perplexity", "gpt2", "--seq-len=0"], 2, "--seq-len must be at least 1"),
    ],
)
def test_bad_input(here, capsys, argv, code, words):
    """One sentence, the right exit code."""
    (here / "empty.txt").write_text("")
    (here / "gap.txt").write_text("a\n\nb\n")
    (here / "cache").mkdir()
    if "huge" in argv:
        write_model(here / "huge", CONFIG)
        weights = load_file(here / "huge" / "model.safetensors")
        save_file({**weights, "transformer.ln_f.weight": np.full(24, 3e38, np.float32)}, here / "huge" / "model.safetensors", {"format": "pt"})
    found, err = refuse(capsys, argv)
    assert (found, words in err) == (code, True), err


@pytest.mark.parametrize(
    ("machine", "flag", "change"),
    [
        ([], "--ram={}", "; use --ram {}, or --disk DIR with "),
        (["--ncpu=0", "--sim-gpu=1"], "--ram={}", "; use --ram {}, or --disk DIR with "),
        (["--ram=100KiB"], "--disk=tier:{}", "; use --disk DIR:{} in a directory with that much free space"),
    ],
)
def test_texts_that_find_no_room_are_refused_before_they_begin(here, capsys, machine, flag, change):
    """With the least budget, which is enough to the last token."""
    argv = ["generate", "gpt2", "--prompt-file=prompts.txt", "--max-new-tokens=24", *machine]
    code, err = refuse(capsys, [*argv, flag.format("60KiB")])
    least = int(re.search(r"3 x \d+ tokens: the step needs ([\d,]+) B of", err)[1].replace(",", ""))
    assert (code, change.format(flag_size(least)) in err) == (3, True), err
    assert refuse(capsys, [*argv, flag.format(least - 4096)])[0] == 3
    assert main([*argv, flag.format(least)]) == 0


@pytest.mark.parametrize(
    ("machine", "flag", "shown"),
    [([], "--ram={}", "--ram {}"), (["--ram=200KiB"], "--disk=tier:{}", "--disk DIR:{}")],
)
def test_beams_count_in_what_texts_need(here, capsys, machine, flag, shown):
    """More than without, refused below the least budget with the flags that would do, and enough at it; one beam fits in less."""
    argv = ["generate", "gpt2", "--prompt-file=prompts.txt", "--max-new-tokens=24", "--temperature=0", *machine]
    code, err = refuse(capsys, [*argv, "--num-beams=4", flag.format("100KiB")])
    least = int(re.search(r"3 x 4 beams x \d+ tokens: the step needs ([\d,]+) B of", err)[1].replace(",", ""))
    assert (code, f"use {shown.format(flag_size(least))}" in err) == (3, True), err
    code, err = refuse(capsys, [*argv, "--num-beams=4", flag.format(least - 4096)])
    assert (code, "; lower --max-new-tokens or --batch or --num-beams, or use" in err) == (3, True), err
    assert main([*argv, flag.format(least - 4096)]) == 0
    assert main([*argv, "--num-beams=4", flag.format(least)]) == 0


@pytest.mark.parametrize(("machine", "flag"), [([], "--ram"), (["--ncpu=0", "--sim-gpu=1", "--ram=1MiB"], "--gpu-memory")])
def test_a_task_that_is_too_large_by_itself(here, capsys, machine, flag):
    """The message says how much it takes, and that is enough."""
    argv = ["generate", "gpt2", "--prompt=a", "--max-new-tokens=4", "--disk=tier:1MiB", *machine]
    code, err = refuse(capsys, [*argv, f"{flag}=8KiB"])
    found = re.search(rf"; use {flag} (\S+)\n", err)
    assert (code, found is not None) == (3, True), err
    assert main([*argv, f"{flag}={found[1]}"]) == 0


def test_a_disk_is_offered_beside_memory_for_the_largest_task(here, capsys):
    """Where the budget of RAM is too small even for that, as much of it as tasks need, and a disk for the rest, is the other choice."""
    argv = ["generate", "gpt2", "--prompt=a", "--max-new-tokens=4"]
    code, err = refuse(capsys, [*argv, "--ram=5"])
    found = re.search(r"; use --ram (\S+), or --ram (\S+) and --disk DIR with \S+ free there\n", err)
    assert (code, found is not None) == (3, True), err
    assert parse_size(found[2], "") < parse_size(found[1], "")
    assert main([*argv, f"--ram={found[1]}"]) == 0
    assert main([*argv, f"--ram={found[2]}", "--disk=tier"]) == 0


def test_flags_for_smaller_work_are_named_where_they_help(here, capsys):
    """A page below the least budget fewer texts or tokens would do; where the weights alone find no room they are not named."""
    argv = ["generate", "gpt2", "--prompt-file=prompts.txt", "--max-new-tokens=40"]
    _, err = refuse(capsys, [*argv, "--ram=60KiB"])
    least = int(re.search(r"the step needs ([\d,]+) B of", err)[1].replace(",", ""))
    assert "lower" not in err
    code, err = refuse(capsys, [*argv, f"--ram={least - 4096}"])
    assert (code, "; lower --max-new-tokens or --batch, or use --ram " in err) == (3, True), err


SCORE = ["perplexity", "gpt2", "--dataset=text", "--dataset-path=text.txt", "--seq-len=48", "--dataset-select=2"]


@pytest.mark.parametrize(
    ("machine", "budgets"),
    [
        ([], {"--ram": "{}"}),
        ([], {"--ram": "{}", "--disk": "tier:{}"}),
        (["--ncpu=0", "--sim-gpu=1"], {"--gpu-memory": "{}", "--ram": "{}"}),
        (["--ncpu=0", "--sim-gpu=2"], {"--gpu-memory": "{}", "--ram": "{}", "--disk": "tier:{}"}),
    ],
)
def test_scoring_that_finds_no_room_names_every_budget_once(here, capsys, machine, budgets):
    """What must be raised, of all memories, and to what: with those budgets the text is scored. Nothing smaller is offered that would not do."""
    argv = [*SCORE, *machine]
    code, err = refuse(capsys, [*argv, *(f"{flag}={text.format('8KiB')}" for flag, text in budgets.items())])
    assert (code, "lower" in err) == (3, False), err
    enough = []
    for flag, text in budgets.items():
        found = re.search(rf"{flag} {'DIR:' if flag == '--disk' else ''}([^\s,]+)", err)
        assert found is not None, err
        enough.append(f"{flag}={text.format(found[1])}")
    assert main([*argv, *enough]) == 0


def test_scoring_is_refused_a_page_below_what_is_enough(here, capsys):
    """With the least budget the text is scored; below it fewer or shorter sequences are offered where they would do."""
    argv = [*SCORE, "--batch=4"]
    _, err = refuse(capsys, [*argv, "--ram=200KiB", "--disk=tier:1KiB"])
    least = int(re.search(r"4 x 48 tokens: the step needs ([\d,]+) B of disk", err)[1].replace(",", ""))
    assert main([*argv, "--ram=200KiB", f"--disk=tier:{least}"]) == 0
    code, err = refuse(capsys, [*argv, "--ram=200KiB", f"--disk=tier:{least - 4096}"])
    assert (code, "; lower --batch or --seq-len, or use --disk DIR:" in err) == (3, True), err


@pytest.mark.parametrize("machine", [[], ["--ncpu=0", "--sim-gpu=1"]])
def test_memory_that_ends_within_a_text(here, capsys, machine):
    """What has no room any more is a refusal with the flags that help, whoever is told of it first."""
    code, err = refuse(capsys, ["generate", "gpt2", "--prompt=some words", "--no-cache", "--max-new-tokens=40", "--ram=50KiB", *machine])
    assert (code, "; raise --ram (now 50KiB), or add --disk DIR" in err) == (3, True), err


def test_models_that_do_not_fit_their_files(here, capsys):
    """A tokenizer of another model, ids that are none, pickles with the command that converts them, weights of another shape."""
    write_model(here / "small", replace(CONFIG, vocab_size=260))
    code, err = refuse(capsys, ["generate", "small", "--prompt=some words"])
    assert (code, "the prompt has the token" in err, "the model's vocabulary has the ids 0 to 259" in err) == (2, True, True)
    config = here / "gpt2" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "eos_token_id": "x"}))
    code, err = refuse(capsys, ["generate", "gpt2", "--prompt=a"])
    assert (code, "eos_token_id in gpt2 must be an id or a list of ids, got 'x'" in err) == (4, True)
    config.write_text(json.dumps({**values, "n_inner": 50}))
    code, err = refuse(capsys, ["generate", "gpt2", "--prompt=a"])
    assert (code, "config.json makes it" in err) == (4, True)
    config.write_text(json.dumps(values))
    (here / "gpt2" / "model.safetensors").rename(here / "gpt2" / "pytorch_model.bin")
    code, err = refuse(capsys, ["generate", "gpt2", "--prompt=a"])
    assert (code, "a torch pickle, which is never loaded here; convert it: python -c" in err) == (4, True)
    code, err = refuse(capsys, ["generate", "gpt2/pytorch_model.bin", "--prompt=a"])
    assert (code, "a torch pickle" in err) == (4, True)


def test_a_prompt_longer_than_a_sequence_is_refused_before_training(here, capsys):
    """--prompt of train: lengths and flag, and no run directory."""
    code, err = refuse(capsys, [*TRAIN[:-1], "--sample-tokens=4", "--run-dir=run", f"--prompt={'words ' * 60}"])
    assert (code, "at most --seq-len = 48 tokens, got" in err) == (2, True)
    assert not (here / "run").exists()


@pytest.mark.parametrize("command", [["generate", "gpt2"], ["train", "--steps=1"]])
def test_a_prompt_in_other_bytes_is_refused(here, capsys, command):
    """What a shell passes on of bytes that are not UTF-8."""
    code, err = refuse(capsys, [*command, "--prompt=x\udcff"])
    assert (code, "--prompt must be text in UTF-8, got other bytes at character 1" in err) == (2, True)
