# Everything a checkout needs, from any folder: `make -C path/to/clone test`.
#
#   PYTHON=python3.12   the interpreter that .venv is made with (3.11 or newer)
#   ARGS='--only lossy' passed on to pytest, to `holdfast demo` or to the benchmarks

PYTHON ?= python3
ARGS ?=
WORKERS ?= 2# test processes; 0 runs the tests in one, as a debugger wants it

BIN := .venv/bin
INSTALLED := .venv/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install packages check test static lint types imports pytest quick soak gpu images fuzz format demo llama \
	bench docs reference screenshots recording constraints clean distclean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## Make .venv with pinned versions (instant when nothing changed)

# The build tool is installed first and used without isolation: what makes the wheel is pinned too.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt setuptools
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e ".[train,dev]"
	touch $@

packages:  ## What tests need of the system: Chromium, nft (instant when it is there)
	tools/install-packages

check: install  ## In 3 minutes: static checks, unit tests of all rooms, the fuzz corpus, 40 simulator seeds
	@$(MAKE) --no-print-directory -j 2 static quick

test: install  ## All that CI runs: static checks beside all tests
	@$(MAKE) --no-print-directory -j 2 static pytest

# Beside pytest, so what they say comes in one piece.
static:
	@said=$$($(MAKE) --no-print-directory -k lint types imports 2>&1); broken=$$?; \
	echo "$$said"; exit $$broken

lint: install  ## Formatting and lint rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install  ## Strict static types
	$(BIN)/mypy

imports: install  ## Which room may import which
	$(BIN)/lint-imports --no-logo

# Tests start processes of their own, so each computes with one thread. Whoever has done its share takes
# tests from others; a fixture of a module is then made twice at worst. Some images forbid compiled files:
# then each of the hundreds of daemons would compile all rooms again.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(WORKERS) --dist worksteal

pytest: install  ## All tests, also the wheel's; narrow down with ARGS='tests/protocol -k lane'
	$(PYTEST) $(ARGS)

ROOMS := protocol membership collectives checkpoint diloco daemon client
QUICK := $(ROOMS:%=tests/%) tests/fuzz tests/test_planting.py

quick: install
	$(PYTEST) -q -m "not slow and not planted" $(QUICK) $(ARGS)
	$(BIN)/holdfast simulate --seeds 40

# 13,000 as the seeds have it and 7,000 with other numbers of peers; the line that it prints first
# repeats it, whatever the commit is then.
soak: install  ## 20,000 simulated runs from seeds that follow from the commit; planted bugs searched for (hours)
	@start=$${START:-$$($(BIN)/python tools/rotating_start.py)}; broken=0; \
	echo "again: make soak START=$$start"; \
	$(BIN)/holdfast simulate --start $$start --seeds 13000 $(ARGS) || broken=1; \
	for peers in 2 3 4 5 6 7 8; do \
		$(BIN)/holdfast simulate --start $$start --seeds 1000 --peers $$peers $(ARGS) || broken=1; \
	done; \
	SEARCH=1 $(PYTEST) -m planted || broken=1; \
	exit $$broken

gpu: install  ## What only a CUDA device can show of the hook; CI has none
	$(BIN)/pytest -p no:cacheprovider tests/client/gpu_check.py $(ARGS)

images: install  ## Build both images and run compose's services, and README's commands on a bare Debian (as root)
	tools/install-packages images
	$(BIN)/pytest -p no:cacheprovider -s tests/images/images_check.py tests/images/bare_check.py $(ARGS)

fuzz: install  ## Fuzz every parser, guided by coverage, and keep finds; ARGS='--seconds 600 message'
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e ".[fuzz]"
	$(BIN)/python -m tests.fuzz --keep $(ARGS)

format: install  ## Format and fix in place
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

demo: install  ## A small run on this machine: master, peers, trainers
	$(BIN)/holdfast demo $(ARGS)

llama: install  ## A small Llama on this machine, from a tokenizer to a text that it writes (some minutes)
	$(BIN)/python examples/llama/run.py $(ARGS)

bench: install  ## Measure everything into benchmarks/RESULTS.md; as root, some with ARGS='--only lossy'
	$(BIN)/python -m benchmarks.run $(ARGS)

docs: reference  ## The documentation as a site, build/docs/index.html; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

reference: install  ## Pages of docs/reference that are made from the code
	$(BIN)/python tools/reference.py

screenshots: install  ## The pictures in docs/pictures/, from a small real run (about two minutes)
	$(BIN)/python tools/screenshots.py $(ARGS)

recording: install  ## The recording docs/pictures/kill.svg, of a real demo (about two minutes)
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e ".[recording]"
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
