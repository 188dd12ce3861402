SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# One more than two cores: a test that waits for a process leaves its core to others.
WORKERS ?= 3
COUNT ?= 400
SEED ?= 1
SHARD ?= 0/1
PROGRAMS ?= 20000
CASES ?= 5000
JOURNAL ?= $(CURDIR)/out/forge.tsv
# A file of tests stays in one process: its fixtures and caches are built once, Ray starts once.
# Files start in the order of tests/conftest.py, the long ones first.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# What the command needs, and on top of it what the tests need: the first run waits for neither more.
# Python compiles what is imported; pip would compile all of it, half of the time of an installation.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
# Of what pip says: downloads that take a while, and that it unpacks. Errors are on stderr.
SHORT := awk '/^ *Downloading .* MB\)/ { split($$2, name, "-"); print "  " name[1], $$3, $$4; fflush() } \
	/^Installing/ { print "  unpacking"; fflush() }'
COMMAND := $(VENV)/.command
TESTS := $(VENV)/.tests

.PHONY: help setup run test matrix everything exhaustive mutants forge modules check bench docs statements sessions count format
help: ## show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(COMMAND): pyproject.toml constraints.txt
	@echo "setting up $(VENV) for the command: JAX, Ray and what they need, about 1 GB on disk, a minute"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e . | $(SHORT)
	@touch $@

$(TESTS): pyproject.toml constraints.txt
	@echo "setting up $(VENV) for the command and its tests, two minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -e '.[dev]' | $(SHORT)
	@touch $(COMMAND) $@

setup: $(TESTS) ## create .venv and install the pinned set, that of the tests too

run: $(COMMAND) ## run the main job: a byte-level Llama under FSDP on one simulated trn1n.32xlarge
	$(BIN)/shardwright run examples/llama_fsdp/job.toml --out $(CURDIR)/out/llama_fsdp

test: setup ## run the tests, on WORKERS processes (3)
	$(PYTEST)

matrix: setup ## run the long matrices that plain `make test` leaves out
	$(PYTEST) -m matrix

everything: setup ## run tests and matrices in one go: what files of both share is made once
	$(PYTEST) -m "not exhaustive"

exhaustive: setup ## run all other cells of the matrices, of which those of `make matrix` are a sample
	$(PYTEST) -m exhaustive

mutants: setup ## damage sources and run the tests of each: COUNT=400, SEED=1, SHARD=0/1; 20 minutes a call
	$(BIN)/python -m tests.mutants --workers $(WORKERS) --count $(COUNT) --seed $(SEED) --shard $(SHARD)
	$(MAKE) forge

forge: setup ## make files that harm their reader and read them; goes on behind JOURNAL=out/forge.tsv
	@mkdir -p $(dir $(JOURNAL))
	$(BIN)/python -m tests.support.forge programs --cases $(PROGRAMS) --seed $(SEED) --workers $(WORKERS) --journal $(JOURNAL)
	$(BIN)/python -m tests.support.forge --cases $(CASES) --seed $(SEED) --workers $(WORKERS) --journal $(JOURNAL) --but programs

modules: setup ## a thousand random modules of all operators at both levels against XLA
	$(BIN)/python -m tests.system.test_random_graphs 1000 1000

check: setup ## format, lint, types, layer rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layers.py

format: setup ## format and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## run the benchmarks (ratios, never asserted); COLLECTIVES=file.csv adds published rows
	$(BIN)/python benchmarks/plan_cold_warm.py
ifdef COLLECTIVES
	$(BIN)/python benchmarks/collectives_vs_published.py $(COLLECTIVES)
endif

docs: setup ## write the generated pages of docs/
	$(BIN)/python -m tests.support.op_coverage
	$(BIN)/python -m tests.support.type_page
	$(BIN)/python -m tests.support.flag_page
	$(BIN)/python -m tests.support.timeline_page
	$(BIN)/python -m tests.support.environment_page
	$(BIN)/python -m tests.support.graph_pages
	$(BIN)/python -m tests.support.models_page

statements: setup ## run every statement of the vendor's documents and write their page (a quarter of an hour)
	$(BIN)/python -m tests.support.statements

sessions: setup ## write what the commands of pages and examples print now (a quarter of an hour)
	$(BIN)/python -m tests.support.console
	$(BIN)/python -m tests.support.gallery

count: ## lines per file, largest first
	@git ls-files '*.py' | xargs wc -l | sort -rn | head -40
