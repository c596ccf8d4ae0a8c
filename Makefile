# `make` alone prints what there is. Debian or Ubuntu with python3 >= 3.11 is all that is needed.
SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

VENV     := .venv
PEERS    := .venv-peers
BIN      := $(VENV)/bin
PYTHON   ?=
# Other queues that `make bench` measures beside this one, in an environment of their own.
PEER_PACKAGES ?= huey~=3.5 litequeue~=0.9 'dramatiq[redis,rabbitmq]~=2.2' 'faststream[cli,redis,rabbit]~=0.7' \
  taskiq~=0.13 taskiq-redis~=1.2 saq~=0.26 'celery[redis]~=5.7' rq~=2.12 'redis[hiredis]' aio-pika~=9.6 uvloop orjson \
  procrastinate~=3.10 'psycopg[binary]'
# arq wants an older redis-py than the others: it has a folder of its own.
ARQ_PACKAGES  ?= arq~=0.28 'redis[hiredis]' uvloop
# More arguments for pytest, ackbone dev or the bench: make test ARGS="-k lanes -x"
ARGS     ?=
# The tests start thousands of processes: without stored bytecode each of them compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

PIP := -m pip --disable-pip-version-check --quiet

.PHONY: help setup run test check soak prepare lint format bench docs clean

help: ## Print this list
	@awk 'BEGIN { FS = ":.*## " } /^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.dev ## Make .venv with the package (editable) and the development tools

run: $(VENV)/.run ## Start the bundled example agent on an embedded SQLite file
	@exec $(BIN)/ackbone dev examples/echo.py:app $(ARGS)

test: prepare lint docs ## Everything CI runs: lint, docs, all tests at CI size, coverage >= 80 %
	@rm -f .coverage .coverage.*
	$(BIN)/pytest -n 2 --dist loadgroup --cov --cov-report=term $(ARGS)

check: lint ## The two-minute loop: lint, types, unit tests
	@$(BIN)/pytest tests/unit -n 2 $(ARGS)

soak: prepare setup ## The fault and property tests at their full counts (hours)
	@ACKBONE_SOAK=1 $(BIN)/pytest tests/faults tests/property -m "" --timeout=7200 -s $(ARGS)

prepare: # system packages of the tests
	@bash tests/prepare.sh

lint: setup ## ruff, mypy --strict and the import arrows
	@status=0
	step() { echo "· $$*"; "$$@" || status=1; }
	step $(BIN)/ruff check .
	step $(BIN)/ruff format --check .
	step $(BIN)/mypy
	step $(BIN)/lint-imports --no-logo
	exit $$status

format: setup ## Format the code and fix what ruff can fix
	@$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: setup $(PEERS)/.ready ## Measure against raw limits and peers; prints a table and ratios
	@ACKBONE_BENCH_PEERS=$(PEERS)/bin/python $(BIN)/python -m bench $(ARGS)

docs: ## Check that every link and every path named in the docs exists
	@$(call find_python)
	"$$python" docs/check_links.py

clean: ## Remove environments, caches and build products (never .ackbone)
	@rm -rf $(VENV) $(PEERS) build dist .coverage .coverage.* htmlcov
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests bench examples docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# ── environments ─────────────────────────────────────────────────────────────────────────────────
# The stamps say which set is installed; a change of pyproject.toml makes them old.

$(VENV)/.dev: pyproject.toml
	@$(call make_venv,$(VENV))
	$(BIN)/python $(PIP) install --editable '.[dev]'
	touch $(VENV)/.run $@

$(VENV)/.run: pyproject.toml
	@$(call make_venv,$(VENV))
	$(BIN)/python $(PIP) install --editable .
	touch $@

$(PEERS)/.ready: Makefile
	@$(call make_venv,$(PEERS))
	$(PEERS)/bin/python $(PIP) install $(PEER_PACKAGES)
	rm -rf $(PEERS)/arq
	$(PEERS)/bin/python $(PIP) install --target $(PEERS)/arq $(ARQ_PACKAGES)
	touch $@

# Sets $$python to the interpreter asked for by PYTHON=, or to the newest tried one that really starts.
define find_python
	python=
	for candidate in $(if $(PYTHON),$(PYTHON),python3.13 python3.12 python3.11 python3); do
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	    python=$$candidate
	    break
	  fi
	done
	if [ -z "$$python" ]; then
	  echo "ackbone needs Python 3.11 or newer$(if $(PYTHON),; '$(PYTHON)' is not that). Install python3 or name one: make setup PYTHON=/path/to/python3" >&2
	  exit 1
	fi
endef

# $(1): the folder. Keeps a good environment, makes a new one otherwise.
define make_venv
	if ! $(1)/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	  $(call find_python)
	  echo "· $(1): $$("$$python" --version)"
	  rm -rf $(1)
	  if ! output=$$("$$python" -m venv $(1) 2>&1); then
	    rm -rf $(1)
	    version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	    as_root=
	    if [ "$$(id -u)" != 0 ]; then as_root=sudo; fi
	    if ! command -v apt-get >/dev/null || { [ -n "$$as_root" ] && ! command -v sudo >/dev/null; }; then
	      echo "$$output" >&2
	      echo "$$python cannot make a virtual environment: install python$$version-venv (Debian, Ubuntu) and try again." >&2
	      exit 1
	    fi
	    echo "· apt-get install python$$version-venv"
	    $$as_root apt-get -o DPkg::Lock::Timeout=300 update -qq
	    $$as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq python$$version-venv >/dev/null
	    "$$python" -m venv $(1)
	  fi
	fi
endef
