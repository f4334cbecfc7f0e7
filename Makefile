# Two commands matter: `make demo` and `make test`. Each sets up .venv from requirements*.lock first, once.
#   PYTHON=python3.12        the interpreter .venv is made from (3.11 or newer)
#   INDEX_URL=https://...    the package index to install from; default: pip's own configuration
#   ARGS="..."               passed on by `make demo` (to rrfp demo), `make test` (to pytest) and `make peers`, `make parity`
#   GPU_PYTHON=3.12          the version of Python for which `make gpu-wheels` fetches wheels
#   DEVICE=cuda|stub|double  where `make gpu-test` and `make gpu-bench` run; the others are stand-ins on the CPU: stub is
#                            torch's own CUDA build over a stub of CUDA, for which out/gpu-stub is set up first (3 GB)
#   GPU_OUT=out              the folder of their results
# `make test` leaves out what is exhaustive (the tests marked long, minutes of them); `make test-long` runs that alone.
PYTHON ?= python3
INDEX_URL ?=
ARGS ?=
GPU_PYTHON ?= 3.12
DEVICE ?= cuda

BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
CODE := $(wildcard rrfp tests examples benchmarks)

# One thread a process: pipeline stages share the machine's cores.
export OMP_NUM_THREADS := 1

# Else every process would compile the package and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test test-fast test-long long-site peers-site peers parity mutation figures lint fmt bench clean gpu-wheels gpu-site gpu-stub gpu-test gpu-bench gpu-questions gpu-all

help:
	@echo "make demo | test | test-fast | test-long | long-site | mutation | figures | lint | fmt | bench | peers | parity | setup | clean | gpu-wheels | gpu-stub | gpu-test | gpu-bench | gpu-questions | gpu-all      (options: see the head of the Makefile)"

setup: $(READY)

demo: $(READY)
	$(BIN)/rrfp demo $(ARGS)

test: lint
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "not long" $(ARGS)

# Without the tests marked slow; for use while editing.
test-fast: $(READY)
	$(BIN)/python -m pytest -m "not slow and not long" $(ARGS)

# The exhaustive and many-seed versions, all examples of the property tests and the mutation check: hours.
test-long: $(READY) long-site
	$(BIN)/python -m pytest -m "long or hypothesis" --hypothesis-profile=full -o faulthandler_timeout=600 --numprocesses auto --dist worksteal $(ARGS)

# Trainers and trackers for the long tests, in a folder of their own. Without it their tests are skipped.
LONG_SITE := out/long-site
long-site: $(LONG_SITE)/.ready
$(LONG_SITE)/.ready: requirements-long.lock | $(READY)
	rm -rf $(LONG_SITE)
	$(PIP) install $(if $(INDEX_URL),--index-url $(INDEX_URL)) --no-deps --target $(LONG_SITE) -r requirements-long.lock
	@touch $@

# DeepSpeed, for benchmarks/peers: built from its sources without its CUDA operators, beside the torch of .venv.
PEERS_SITE := out/peers-site
peers-site: $(PEERS_SITE)/.ready
$(PEERS_SITE)/.ready: requirements-peers.lock | $(READY)
	rm -rf $(PEERS_SITE)
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) install $(if $(INDEX_URL),--index-url $(INDEX_URL)) --no-deps --no-build-isolation --target $(PEERS_SITE) -r requirements-peers.lock
	@touch $@

peers: $(READY) peers-site
	$(BIN)/python benchmarks/peers/run.py $(ARGS)

# Do the tests notice when the code is wrong? See tests/mutation/check.py for ARGS.
mutation: $(READY)
	PYTHONPATH=tests $(BIN)/python -m mutation.check $(ARGS)

# Files, lines and imports by room; tests/test_rooms.py holds the limits.
figures: $(READY)
	$(BIN)/python tests/rooms.py

# The last line builds the documentation site, where every warning, such as a link that leads nowhere, is an error.
lint: $(READY)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy --strict $(CODE)
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir out/site

fmt: $(READY)
	$(BIN)/ruff check --fix-only $(CODE)
	$(BIN)/ruff format $(CODE)

# They take long, and measure no speed.
OF_HOURS := benchmarks/soak/run.py benchmarks/suspend/run.py benchmarks/parity/run.py

bench: $(READY)
	@set -e; for file in $(filter-out $(OF_HOURS),$(wildcard benchmarks/*/run.py)); do echo "== $$file"; $(BIN)/python $$file $(ARGS); done

# Losses by readiness beside other ways to train: half an hour; ARGS=--full takes hours, and goes on where it was stopped.
parity: $(READY)
	$(BIN)/python benchmarks/parity/run.py $(ARGS)

# The GPU targets use $(PYTHON) with its own torch and without .venv. They need no network: gpu-wheels, which does, is
# run before on another machine, and out/gpu-wheels is carried to the one with the GPU.
GPU_OUT ?= $(CURDIR)/out
GPU_STUB ?= $(CURDIR)/out/gpu-stub
ifeq ($(DEVICE),stub)
GPU_READY := gpu-stub
GPU_PYTHONPATH := $(CURDIR):$(CURDIR)/tests
GPU_PROGRAM := $(GPU_STUB)/bin/python
else
GPU_READY := gpu-site
GPU_PYTHONPATH = $(CURDIR):$(CURDIR)/tests:$(GPU_OUT)/gpu-site:$$PYTHONPATH
GPU_PROGRAM = $(PYTHON)
endif
GPU_RUN = PYTHONPATH="$(GPU_PYTHONPATH)" $(GPU_PROGRAM)

gpu-wheels:
	$(PYTHON) benchmarks/gpu/wheels.py download --python $(GPU_PYTHON)

gpu-site:
	$(PYTHON) benchmarks/gpu/wheels.py install --into $(GPU_OUT)/gpu-site

# An environment of its own, which no other target needs: it says what it fetches, and what it lacks.
gpu-stub:
	@$(PYTHON) tests/gpu/stub/environment.py $(GPU_STUB)

# Other plugins that are installed there are none of the project's; their warnings are not, either.
gpu-test: $(GPU_READY)
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(GPU_RUN) -m pytest tests/gpu -p asyncio -p timeout -m gpu -W default \
		--device $(DEVICE) --results $(GPU_OUT)/gpu-test.txt $(ARGS)

gpu-bench: $(GPU_READY)
	$(GPU_RUN) benchmarks/gpu/run.py --device $(DEVICE) --results $(GPU_OUT)/gpu-bench.txt $(ARGS)

# Everything above in the order of what it settles; may be stopped anywhere.
gpu-all: $(GPU_READY)
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(GPU_RUN) benchmarks/gpu/all.py --device $(DEVICE) --results $(GPU_OUT)/gpu-all $(ARGS)

gpu-questions:
	$(GPU_RUN) benchmarks/gpu/questions.py --results $(GPU_OUT)/gpu-questions.txt $(ARGS)

clean:
	rm -rf .venv out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `pip check` may complain of torchtitan, which comes without what it requires (requirements-no-deps.lock).
# The stamp holds the tree's path and is written last: an interrupted setup leaves none, and a tree that was moved or
# copied (an environment is bound to its path) is set up anew.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
endif
$(READY): requirements.lock requirements-no-deps.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "RRFP needs Python 3.11 or newer: install it, or name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "this Python cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
	@if [ -e $@ ] && [ "$$(cat $@)" = "$(CURDIR)" ]; then rm $@; else rm -rf .venv; fi
	@[ -d .venv ] || $(PYTHON) -m venv .venv
	$(PIP) install $(if $(INDEX_URL),--index-url $(INDEX_URL)) -r requirements.lock
	$(PIP) install $(if $(INDEX_URL),--index-url $(INDEX_URL)) --no-deps -r requirements-no-deps.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	$(BIN)/python rrfp/lab/report/library.py
	@! $(PIP) check | grep --invert-match --extended-regexp '^(No broken requirements found|torchtitan )'
	@echo "$(CURDIR)" > $@
