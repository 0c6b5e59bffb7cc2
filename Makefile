# Everything that is done to this checkout; the environment is .venv and is made when needed.
# ARGS adds flags to what is run: make train ARGS="--train.steps 20".

SHELL := /bin/bash
.DEFAULT_GOAL := train
.DELETE_ON_ERROR:
.PHONY: train test test-slow bench lint types wheel

# The release that torch_npu is built for, from wherever pip looks: a CPU build where that is at hand.
TORCH := torch==2.13.0
BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check install

# Each is touched last and removed first, so one that exists means a finished installation.
RUN := .venv/.run-is-installed
ALL := .venv/.all-is-installed

train: $(RUN)
	$(BIN)/python recipes/qwen3vl.py $(ARGS)

test: $(ALL)
	$(BIN)/pytest $(ARGS)

test-slow: $(ALL)
	$(BIN)/pytest -m slow $(ARGS)

bench: $(ALL)
	$(BIN)/python tests/bench/run_all.py $(ARGS)

lint: $(ALL)
	$(BIN)/ruff format --check
	$(BIN)/ruff check

types: $(ALL)
	$(BIN)/mypy
	$(BIN)/pyright

# A stale build folder would put deleted files into the wheel.
wheel: $(ALL)
	rm -rf build dist
	$(BIN)/python -m build --quiet --outdir dist

# An environment that is half made, by hand or by an interrupted call, is made anew.
$(RUN): pyproject.toml
	@test -e $@ || { \
	  for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      exec $$python -m venv --clear .venv; \
	    fi; \
	  done; \
	  echo "no python >= 3.11 was found; name one: make PYTHON=..." >&2; exit 1; }
	rm -f $(RUN) $(ALL)
	$(PIP) $(TORCH)
	$(PIP) --editable .
	touch $@

$(ALL): $(RUN)
	rm -f $(RUN) $(ALL)
	$(PIP) --editable '.[test,dev]'
	touch $(RUN)
	touch $@
