# make serve   install what is missing, then serve the demo model on http://127.0.0.1:8000
# make test    install what is missing, then run the tests
# make test-kernels    all kernel tests that need no GPU: more shapes, simulated and compiled for sm_90a (some minutes)
# On a machine with an NVIDIA GPU, `make serve` installs JAX for CUDA 13 as well; EXTRAS=cuda12 or EXTRAS= changes that.

MODEL ?= demo
ARGS ?=
EXTRAS ?= $(if $(shell command -v nvidia-smi 2>/dev/null),cuda13)
PYTHON ?= $(shell for p in python3.12 python3.13 python3 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 && { echo $$p; break; }; done)
UV := $(shell command -v uv 2>/dev/null)
BIN := .venv/bin

.PHONY: serve test test-kernels lint typecheck bench clean

serve: .venv/installed-$(or $(EXTRAS),cpu)
	$(BIN)/dsjax serve $(MODEL) $(ARGS)

test: .venv/installed-dev
	$(BIN)/python -m pytest $(ARGS)

test-kernels: .venv/installed-dev
	$(BIN)/python -m pytest tests/pallas_kernels -m "not gpu" $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

typecheck: .venv/installed-dev
	$(BIN)/pyright

bench: .venv/installed-dev
	$(BIN)/python -m bench.engine $(ARGS)

clean:
	rm -rf .venv

.venv/bin/python:
ifneq ($(PYTHON),)
	$(PYTHON) -m venv .venv
else ifneq ($(UV),)
	$(UV) venv --quiet --seed --python 3.12 .venv
else
	@echo "dsjax needs Python 3.12 or newer with the venv module (or uv). Install it, or name it: make PYTHON=/path/to/python3.12" >&2
	@exit 1
endif

.venv/installed-%: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.$(if $(filter-out cpu,$*),[$*])'
	@touch $@
