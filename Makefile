# Each target is one command from a fresh clone; the environment in .venv is made when it is first needed.
PYTHON ?= python3
VENV   ?= .venv
PINS   ?= constraints.txt
BIN    := $(VENV)/bin
DISTS  := core cli kernels plugins/tape plugins/cuda_graph plugins/cpu_graph plugins/flashinfer plugins/fa3 plugins/trtllm_mla \
          plugins/speculative engine conformance museum adapters guard integrations/sglang integrations/vllm \
          swarm scaffold benchmarks
CPP    := $(wildcard kernels/graphpact_kernels/compiled/*.cpp kernels/graphpact_kernels/compiled/*.h)
STAMP  := $(VENV)/.installed
QUIET  := $$(test -t 1 || echo --quiet)  # pip shows its progress on a terminal

.PHONY: help demo break test test-all bench models peers sglang sglang-smoke sglang-test sglang-test-all \
        vllm vllm-smoke vllm-test vllm-test-all check docs screenshots dist format clean

# Times are those of two cores. The first target makes the environment before, about five minutes and 2.5 GB, and
# the first engine compiles kernels, 10 to 60 seconds.
help:                 ## say what each target does, and what it takes
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP)        ## write text through captured decode graphs, every replay verified; a minute
	$(BIN)/graphpact generate --config examples/demo.toml --file examples/prompts.txt \
	    --temperature 0.4 --max-new-tokens 120 --verify

break: $(STAMP)       ## plant three real bugs: silent, and then named; half a minute
	$(BIN)/python examples/break_it.py

# Tensors of tests are tiny: threads would wait for each other, most of all on a machine that others use. So there
# is a process for each core, up to eight, and each takes whole files, whose fixtures are made once.
PYTEST := $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile
test test-all: export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes; each would compile every source again
test: $(STAMP)        ## run the tests, but for the long sweeps; five minutes
	$(PYTEST) -m "not sweep"

test-all: test        ## run the tests, and then the long sweeps; 40 minutes or more. SHARE=0/8: an eighth of the sweeps
	$(PYTEST) -m sweep $(SHARE:%=--share %)

bench: $(STAMP)       ## measure, as ratios inside one process; tens of minutes
	$(BIN)/graphpact bench all

models: export OMP_NUM_THREADS ?= 1
models: $(STAMP)      ## hold every architecture of transformers against transformers, and write docs/reference/models.md; tens of minutes
	PYTHONPATH=docs/tools $(BIN)/python -m model_sweep

peers: $(STAMP)       ## check builders of released engines, and write docs/reference/peers.md and build/peers.md; downloads wheels, then a quarter of an hour
	PYTHONPATH=tests $(BIN)/python -m peers --results build/peers.json --page

sglang: $(VENV)-sglang/.installed ## make .venv-sglang, in which SGLang runs on a CPU; a minute and 2.5 GB

sglang-smoke: sglang  ## run a few of the tests with the real SGLang; three minutes
	cd integrations/sglang/tests/engine && $(abspath $(VENV))-sglang/bin/python -m pytest -q -m smoke

sglang-test: sglang   ## run the tests with the real SGLang on a tape, but for the sweeps; a quarter of an hour
	cd integrations/sglang/tests/engine && $(abspath $(VENV))-sglang/bin/python -m pytest -q -n 2 --dist loadfile -m "not sweep"

sglang-test-all: sglang ## run the sweeps too; half an hour
	cd integrations/sglang/tests/engine && $(abspath $(VENV))-sglang/bin/python -m pytest -q -n 2 --dist loadfile

vllm: $(VENV)-vllm/.installed ## make .venv-vllm, in which vLLM runs on a CPU; a minute and 2.8 GB

vllm-smoke: vllm      ## run a few of the tests with the real vLLM; three minutes
	cd integrations/vllm/tests/engine && $(abspath $(VENV))-vllm/bin/python -m pytest -q -m smoke

vllm-test: vllm       ## run the tests with the real vLLM on a tape, but for the sweeps; a quarter of an hour
	cd integrations/vllm/tests/engine && $(abspath $(VENV))-vllm/bin/python -m pytest -q -n 2 --dist loadfile -m "not sweep"

vllm-test-all: vllm   ## run the sweeps too; three quarters of an hour
	cd integrations/vllm/tests/engine && $(abspath $(VENV))-vllm/bin/python -m pytest -q -n 2 --dist loadfile

check: $(STAMP)       ## lint, format, types, imports, docstrings; some minutes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/interrogate -q .

docs:                 ## build the pages and the reference of names as a site, build/docs/index.html; makes a separate environment, then a minute
	@echo "making $(VENV)-docs: pip installs sphinx and its extensions, about a minute" >&2
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install $(QUIET) --requirement requirements-docs.txt
	$(VENV)-docs/bin/sphinx-build -q -n -W --keep-going -j auto docs build/docs

screenshots: $(STAMP)  ## run the commands of the pictures in docs/pictures, and write these; two minutes
	$(BIN)/python docs/tools/screenshots.py

dist: $(VENV)-release/.installed ## build every distribution from the last commit into dist/, and check it; a minute
	rm -rf dist
	$(VENV)-release/bin/python release/build.py dist $(DISTS)
	$(VENV)-release/bin/twine check --strict dist/*
	$(VENV)-release/bin/check-wheel-contents dist/*.whl

format: $(STAMP)      ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:                ## forget the environment and every cache
	rm -rf $(VENV) $(VENV)-docs $(VENV)-release $(VENV)-sglang $(VENV)-vllm build dist docs/reference/api .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)-release/.installed: requirements-release.txt
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install $(QUIET) --requirement $<
	touch $@

$(VENV)-%/.installed: integrations/make_environment.py integrations/%/requirements.txt $(DISTS:%=%/pyproject.toml)
	$(PYTHON) integrations/make_environment.py $(VENV)-$* $*
	touch $@

$(STAMP): $(PINS) requirements-dev.txt $(DISTS:%=%/pyproject.toml)
	@echo "making $(VENV), once: pip installs torch and 100 other packages, 2.5 GB; about five minutes" >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUIET) --constraint $(PINS) --requirement requirements-dev.txt \
	    $(foreach dist,$(DISTS),--editable $(dist))
	touch $@
