# Everything a checkout needs, from any folder: `make -C path/to/clone test`.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (3.11 or newer)
#   ARGS='--only lines' passed on to pytest, to `holdfast demo` or to the benchmarks

PYTHON ?= python3
ARGS ?=
WORKERS ?= 3# test processes: one more than cores, since tests of processes wait; 0 runs the tests in one, as a debugger wants it

BIN := .venv/bin
INSTALLED := .venv/.installed
DEV := .venv/.dev
LLAMA := .venv/.llama
PIP_INSTALL := $(BIN)/pip install -q -c constraints.txt

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Some images forbid compiled files: then each process of a demo or of the tests would compile all rooms again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install dev packages check test nightly static lint types imports pytest seeds quick simulate alltypes nightlytests \
	loop soak durations gpu images fuzz format demo llama bench docs reference screenshots recording constraints clean distclean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## Make .venv with what a run needs, in pinned versions (instant when nothing changed)

# The build tool is installed first and used without isolation: what makes the wheel is pinned too.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) setuptools
	$(PIP_INSTALL) --no-build-isolation -e ".[train]"
	touch $@

dev: $(DEV)  ## The same, and what checks, tests and documentation need

$(DEV): $(INSTALLED)
	$(PIP_INSTALL) --no-build-isolation -e ".[train,dev]"
	touch $@

$(LLAMA): $(INSTALLED)
	$(PIP_INSTALL) --no-build-isolation -e ".[train,transformers]"
	touch $@

packages:  ## What tests need of the system: Chromium, nft (instant when it is there)
	tools/install-packages

check: dev  ## In 2 minutes: static checks, unit tests of all rooms, the fuzz corpus, 40 simulator seeds
	@$(MAKE) --no-print-directory -j 2 static quick

# Every part writes into this folder what it costs; `make durations` keeps it.
test: export DURATIONS := build/durations
test: dev packages  ## All that CI runs: static checks beside all tests but nightly ones, then rotating seeds
	@rm -rf $(DURATIONS)
	@$(MAKE) --no-print-directory -j 2 static pytest
	@$(MAKE) --no-print-directory seeds

# All parts run, whatever fails; the last line names those that did.
NIGHTLY := alltypes nightlytests seeds soak loop fuzz images
nightly: dev packages  ## For hours: labs, recipes, the sharded matrix, 20,000 seeds, fuzzing, tests in a loop
	@broken=; for part in $(NIGHTLY); do \
		echo "==== make $$part"; $(MAKE) --no-print-directory $$part || broken="$$broken $$part"; \
	done; \
	test -z "$$broken" || { echo "failed:$$broken"; exit 1; }

# Beside pytest, so what they say comes in one piece.
static:
	@said=$$($(MAKE) --no-print-directory -k lint types imports 2>&1); broken=$$?; \
	echo "$$said"; exit $$broken

TIMED := $(BIN)/python tools/durations.py time
STATIC := "static checks"

lint: dev  ## Formatting and lint rules
	$(TIMED) layout $(STATIC) $(BIN)/ruff format --check .
	$(TIMED) lint $(STATIC) $(BIN)/ruff check .

types: dev  ## Strict static types of the package and of what tests share
	$(TIMED) types $(STATIC) $(BIN)/mypy .import/holdfast $$(find tests -name '*.py' ! -name 'test_*.py')

alltypes: dev  ## Strict static types of everything
	$(BIN)/mypy

imports: dev  ## Which room may import which
	$(TIMED) imports $(STATIC) $(BIN)/lint-imports --no-logo

# Tests start processes of their own, so each computes with one thread. Whoever has done its share takes
# tests from others; a fixture of a module is then made twice at worst.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

pytest: dev  ## All tests but nightly ones; narrow down with ARGS='tests/protocol -k lane'
	$(PYTEST) -m "not nightly" $(ARGS)

# Those of the commit that failed before it fail nothing: they are named, and kept in build/known-seeds.
seeds: dev  ## 100 simulated runs from seeds that follow from the commit, judged by what it is based on
	$(TIMED) rotating seeds $(BIN)/python -m tests.swarm.rotating $(SEEDS)

nightlytests: dev
	$(PYTEST) -m nightly $(ARGS)

durations: dev  ## Keep what the last `make test` took: tests/durations.json, the table in CONTRIBUTING.md
	$(BIN)/python tools/durations.py keep

# What fails once in a hundred runs: each must pass every time.
LOOPS ?= 30
loop: dev  ## The tests of processes and of the page 30 times (hours)
	@broken=0; for number in $$(seq $(LOOPS)); do \
		$(PYTEST) -q -m "not nightly" tests/processes tests/browser $(ARGS) \
			|| { broken=$$((broken + 1)); echo "failed in loop $$number"; }; \
	done; \
	echo "$$broken of $(LOOPS) loops failed"; test $$broken = 0

SIMULATE := $(BIN)/python -m holdfast.simulation

ROOMS := protocol membership collectives checkpoint diloco daemon client
QUICK := $(ROOMS:%=tests/%) tests/fuzz tests/test_planting.py tests/test_durations.py

quick: dev
	$(PYTEST) -q -m "not slow and not planted and not nightly" $(QUICK) $(ARGS)
	$(SIMULATE) --seeds 40

simulate: dev  ## Whole runs in virtual time, with faults from seeds; ARGS='--seeds 2000'
	$(SIMULATE) $(ARGS)

# 13,000 plain ones as the seeds have it, 7,000 with other numbers of peers, and 3,000 of the other
# kinds; the line that it prints first repeats it, whatever the commit is then.
soak: dev  ## 23,000 simulated runs from seeds that follow from the commit; planted bugs searched for (hours)
	@start=$${START:-$$($(BIN)/python tools/rotating_start.py)}; broken=0; \
	echo "again: make soak START=$$start"; \
	$(SIMULATE) --start $$start --seeds 13000 $(ARGS) || broken=1; \
	for peers in 2 3 4 5 6 7 8; do \
		$(SIMULATE) --start $$start --seeds 1000 --peers $$peers $(ARGS) || broken=1; \
	done; \
	for kind in failover hostile hosted; do \
		$(SIMULATE) --start $$start --seeds 1000 --$$kind $(ARGS) || broken=1; \
	done; \
	$(BIN)/python -m tests.swarm.rotating --known || broken=1; \
	SEARCH=1 $(PYTEST) -m planted || broken=1; \
	exit $$broken

gpu: dev  ## What only a CUDA device can show of the hook; CI has none
	$(BIN)/pytest -p no:cacheprovider tests/client/gpu_check.py $(ARGS)

images: dev  ## Build both images and run compose's services, and README's commands on a bare Debian (as root)
	tools/install-packages images
	$(BIN)/pytest -p no:cacheprovider -s tests/images/images_check.py tests/images/bare_check.py $(ARGS)

fuzz: dev  ## Fuzz every parser, guided by coverage, and keep finds; ARGS='--seconds 600 message'
	$(PIP_INSTALL) --no-build-isolation -e ".[fuzz]"
	$(BIN)/python -m tests.fuzz --keep $(ARGS)

format: dev  ## Format and fix in place
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: install  ## A small run on this machine: master, peers, trainers
	$(BIN)/holdfast demo $(ARGS)

llama: $(LLAMA)  ## A small Llama on this machine, from a tokenizer to a text that it writes (some minutes)
	$(BIN)/python examples/llama/run.py $(ARGS)

bench: dev  ## Measure everything into benchmarks/RESULTS.md; as root, some with ARGS='--only lines'
	$(BIN)/python -m benchmarks.run $(ARGS)

docs: reference  ## The documentation as a site, build/docs/index.html; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

reference: dev  ## Pages of docs/reference that are made from the code
	$(BIN)/python tools/reference.py

screenshots: dev  ## The pictures in docs/pictures/, from a small real run (about two minutes)
	$(BIN)/python tools/screenshots.py $(ARGS)

recording: dev  ## The recording docs/pictures/kill.svg, of a real demo (about two minutes)
	$(PIP_INSTALL) --no-build-isolation -e ".[recording]"
	$(BIN)/python tools/record_demo.py $(ARGS)

# A scratch environment, so that only what pyproject.toml asks for gets into the list.
constraints:  ## Take the newest versions into constraints.txt
	tools/update-constraints $(PYTHON)

clean:  ## Remove build output and caches, keep .venv
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache .grimp_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## Remove .venv too
	rm -rf .venv
