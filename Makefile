PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
COUNT ?= 400
SEED ?= 1
SHARD ?= 0/1
# A file of tests stays in one process: its fixtures and caches are built once, Ray starts once.
# Files start in the order of tests/conftest.py, the long ones first.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.installed

.PHONY: help setup run test matrix mutants check bench docs sessions count format
help: ## show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

setup: $(STAMP) ## create .venv and install the pinned set

run: setup ## run the main job: a byte-level Llama under FSDP on one simulated trn1n.32xlarge
	$(BIN)/shardwright run examples/llama_fsdp/job.toml --out $(CURDIR)/out/llama_fsdp

test: setup ## run the tests, on WORKERS processes (2)
	$(PYTEST)

matrix: setup ## run the long matrices that plain `make test` leaves out
	$(PYTEST) -m matrix

mutants: setup ## damage sources and run the tests of each: COUNT=400, SEED=1, SHARD=0/1; 20 minutes a call
	$(BIN)/python -m tests.mutants --workers $(WORKERS) --count $(COUNT) --seed $(SEED) --shard $(SHARD)

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
	$(BIN)/python -m tests.support.flag_page

sessions: setup ## write what the commands of pages and examples print now (a quarter of an hour)
	$(BIN)/python -m tests.support.console
	$(BIN)/python -m tests.support.gallery

count: ## lines per file, largest first
	@git ls-files '*.py' | xargs wc -l | sort -rn | head -40
