# make train   create .venv, install nntask, train a small GPT-2 (make train ARGS="--steps 40")
# make test    create .venv with the development tools; lint, types, contracts, and two cases of each quick test: five minutes on two cores
# make test-more   the rest of the default suite: the other cases, and slower tests
# make test-all    everything, before an issue is resolved: the three below, the tests that take long, random searches with all their examples, and the
#              default suite as a processor with AVX2 and without AVX-512 runs it (tests/real is skipped unless `make test-real` has installed its packages)
# make suite   the default suite, which is what test and test-more run (make suite ARGS="tests/tiles -x" runs some of it, PROCESSES=0 in one process)
# make coverage   the default suite, with the share of lines that it runs (ARGS as above; make coverage ARGS='-m "not (more or long or pages or browser)"'
#              for that of make test)
# make lint    style, types, import contracts and house English
# make test-pages   the commands of the README and of the site's pages, as printed
# make test-real   published checkpoints beside transformers, torch, PEFT and llama.cpp: downloads 270 MB of packages into .venv, runs half an hour
# make test-torch-releases   the tests of wrappers/torch with each supported release of PyTorch, in environments of their own below build/;
#              by hand (TORCH_RELEASES=2.14 for one of them, --keep-going for all in spite of failures; several GB each where PyTorch comes with CUDA)
# make test-gpu    the tests that need a GPU; writes benchmarks/gpu/tests.json (GPU_PYTHON=python3 for an interpreter that has CuPy already)
# make bench-gpu   measurements on a GPU beside torch; writes benchmarks/gpu/results.json and docs/results/gpu.md
# make first-card  everything that only a card can show, in stages of at most nine minutes: build/first-card/summary.md
#              (ARGS=--list what they are, ARGS="--stage kernels streams" some of them, ARGS=--rehearse without a card; make first-card-wheels packs what may be missing)
# make test-browser   the report and the dashboard's page in a headless Chromium (apt-get install chromium chromium-driver)
# make test-docker build the container and train in it (root, buildah, debootstrap)
# make bench   measurements beside peers; writes benchmarks/results, docs/results and the headlines of README.md
# make sweep   modules of transformers, PEFT, torchvision and timm, in sessions and in eager PyTorch, before a release: an hour (ARGS="--only Bert",
#              ARGS=--resume); writes benchmarks/results and docs/results
# make constraints   constraints.txt, with the versions of .venv
# make docs    the site, with every warning as an error: build/docs/index.html
# make clean   remove .venv and caches; runs/ stays
#
# Installing happens again only when pyproject.toml or constraints.txt is newer than the last installation.

PYTHON ?= python3
ARGS ?=
PROCESSES ?= 3
VENV := .venv
BIN := $(VENV)/bin
# PyTorch of .venv, and so of CI; minor releases that wrappers/torch is tested with.
TORCH ?= 2.13.0
TORCH_RELEASES ?= 2.12 2.13 2.14 2.15
SOURCES := nntask tiles scheduler wrappers examples tests benchmarks docs

# Versions of .venv: those of constraints.txt (CONSTRAINTS=/dev/null for the newest that pyproject.toml allows).
CONSTRAINTS ?= constraints.txt
PINNED = --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)

# An interpreter with CuPy, torch with CUDA if it is to be compared with, and the packages of nntask.
CUDA ?= 13
GPU_PYTHON ?= $(BIN)/python
GPU_READY = $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/installed-gpu)

.PHONY: train test test-more test-all test-real test-pages test-docker test-browser test-torch-releases test-gpu bench-gpu first-card first-card-wheels lint style types contracts english suite coverage bench sweep constraints docs clean
.DELETE_ON_ERROR:

# Compiled modules are kept; otherwise each of the processes that tests start compiles all that it imports, for two seconds.
unexport PYTHONDONTWRITEBYTECODE

train: $(VENV)/installed-train
	$(BIN)/nntask train --model tiny --grad-clip 1 $(ARGS)
	@echo "nntask is in $(BIN); to have it as a command in this shell: . $(BIN)/activate"

test: MARK := -m "not (more or long or pages or browser)"
test: style types contracts suite

test-more: MARK := -m "more and not (long or pages or browser)"
test-more: suite

# Each a make of its own: all are `suite`, which one make runs once.
test-all:
	$(MAKE) style types contracts
	$(MAKE) suite
	$(MAKE) test-pages
	$(MAKE) suite PROCESSES=0 MARK='-m "long or search" --hypothesis-profile=many'
	$(BIN)/python tests/support/processor.py $(MAKE) suite

test-real: export OPENBLAS_NUM_THREADS = 1
test-real: export OMP_NUM_THREADS = 1
test-real: export MKL_NUM_THREADS = 1
test-real: export TOKENIZERS_PARALLELISM = false
test-real: export HF_HUB_OFFLINE = 1
test-real: $(VENV)/installed-real
	$(BIN)/python benchmarks/real_checkpoints.py $(ARGS)

test-pages: MARK := -m "pages and not long"
test-pages: suite

test-browser: MARK := -m browser tests/wrappers/report/test_browser.py
test-browser: PROCESSES := 0
test-browser: suite

test-torch-releases: $(TORCH_RELEASES:%=test-torch-%)

test-torch-%: build/torch-%/installed
	build/torch-$*/venv/bin/python -m pytest -n $(PROCESSES) --dist worksteal $(MARK) $(ARGS) tests/wrappers/torch

test-docker:
	docker/test.sh

test-gpu bench-gpu first-card: export PYTHONPATH = $(CURDIR)
test-gpu: $(GPU_READY)
	$(GPU_PYTHON) -m pytest -q -m "long or not long" tests/gpu --gpu-json=benchmarks/gpu/tests.json $(ARGS)

bench-gpu: $(GPU_READY)
	$(GPU_PYTHON) benchmarks/gpu/bench.py $(ARGS)

# A list of stages takes the standard library only.
first-card: PYTHON_OF_CARD = $(if $(filter --list,$(ARGS)),$(PYTHON),$(GPU_PYTHON))
first-card: $(if $(filter --list,$(ARGS)),,$(GPU_READY))
	$(PYTHON_OF_CARD) benchmarks/gpu/first_card.py $(if $(wildcard build/wheels),--wheels build/wheels) $(ARGS)

first-card-wheels: $(VENV)/installed-dev
	$(BIN)/python benchmarks/gpu/first_card.py --pack build/wheels

lint: style types contracts english

style: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

contracts: $(VENV)/installed-dev
	$(BIN)/lint-imports

# The prose of modules and pages. Not a prerequisite of test: the file is one of the suite.
english: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/contracts/test_prose.py

# One BLAS thread for each of our workers; torch, the oracle, gets the same.
suite test-torch-%: export OPENBLAS_NUM_THREADS = 1
suite test-torch-%: export OMP_NUM_THREADS = 1
suite test-torch-%: export MKL_NUM_THREADS = 1
suite test-torch-%: export TOKENIZERS_PARALLELISM = false
suite test-torch-%: export HF_HUB_OFFLINE = 1
suite: $(VENV)/installed-dev
	$(BIN)/python $(UNDER) -m pytest -n $(PROCESSES) --dist worksteal $(MARK) $(ARGS)

coverage: UNDER := -m coverage run
coverage: suite
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --sort=cover

bench: $(VENV)/installed-dev
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/trace_cost.py
	$(BIN)/python benchmarks/gpu/host.py
	$(BIN)/python benchmarks/table.py

# An environment of its own, since transformers imports torchvision wherever it is installed.
sweep: build/sweep/installed
	build/sweep/bin/python benchmarks/sweep/run.py $(ARGS)
	build/sweep/bin/python benchmarks/table.py

build/sweep/installed: pyproject.toml
	$(PYTHON) -m venv --clear build/sweep
	build/sweep/bin/python -m pip install --quiet --disable-pip-version-check -e ".[sweep]"
	@touch $@

constraints: $(VENV)/installed-dev $(VENV)/installed-docs
	@echo "# Versions with which the suite passed: pip install --constraint constraints.txt nntask. Written by make constraints." > constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable | grep -vE '^(torch|nvidia-|cuda-|triton)' >> constraints.txt

docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -q -W --keep-going -n -E -b html docs build/docs
	@echo "the site is build/docs/index.html"

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "nntask needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing);" \
	       "name another one, e.g.: make $(or $(MAKECMDGOALS),train) PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/installed-train: $(VENV)/created pyproject.toml constraints.txt
	$(BIN)/python -m pip install $(PINNED) -e ".[text,onednn]"
	@touch $@

# The development extra contains what training needs, so one installation serves both.
$(VENV)/installed-dev: $(VENV)/created pyproject.toml constraints.txt
	$(BIN)/python -m pip install $(PINNED) -e ".[dev]" "torch==$(TORCH)"
	@touch $@ $(VENV)/installed-train

$(VENV)/installed-real: $(VENV)/installed-dev tests/real/packages.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/real/packages.txt
	@touch $@

.PRECIOUS: build/torch-%/installed
build/torch-%/installed: pyproject.toml
	$(PYTHON) -m venv --clear $(@D)/venv
	$(@D)/venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" "torch==$*.*"
	@touch $@

$(VENV)/installed-docs: $(VENV)/created pyproject.toml constraints.txt
	$(BIN)/python -m pip install $(PINNED) -e ".[docs]"
	@touch $@

$(VENV)/installed-gpu: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,cuda$(CUDA)]"
	@touch $@

clean:
	rm -rf $(VENV) .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
