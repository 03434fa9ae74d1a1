# The gate is one command: make check. Everything runs in .venv, which scripts/env.sh makes; only Python 3.11+ is needed.
#
# PYTHON=python3.12   another interpreter
# ARGS='-k digest'    more arguments for pytest, or for the quick start
# STEPS=3 MODEL=path  the quick start's length and its checkpoint

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv fmt lint types check test ci quickstart proto dist clean

PY := .venv/bin/python
PYTEST := $(PY) -m pytest $(ARGS)

help: ## Lists these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: ## Builds .venv, or does nothing when it is current
	@scripts/env.sh dev .venv >/dev/null

fmt: venv ## Formats the code and applies the linter's safe fixes
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

lint: venv ## Format and lint, read-only
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: venv ## mypy --strict over the whole package
	$(PY) scripts/typed_tree.py build/typed
	cd build/typed && ../../$(PY) -m mypy -p weight_sync --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

check: lint types ## The gate: format, lint, types and the fast tests
	$(PYTEST) -m "not slow"

test: venv ## All tests
	$(PYTEST)

ci: lint types test ## The gate and all tests, nothing twice

quickstart: venv ## Trains a small real model and serves what was trained (STEPS=3 MODEL=path)
	$(PY) examples/quickstart/run.py $(if $(STEPS),--steps $(STEPS)) $(if $(MODEL),--model "$(MODEL)") $(ARGS)

proto: ## Regenerates proto/v1/*_pb2.py from the .proto files
	PYTHON="$$(scripts/env.sh proto)/bin/python" scripts/gen_proto.sh

dist: venv ## Wheel and sdist, in dist/
	rm -rf dist build/lib build/bdist.*
	$(PY) -m build --no-isolation

clean: ## Removes all that is built here; the shared environments in the cache stay
	rm -rf .venv .venv.lock build dist weight_sync.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
