# The gate is one command: make check. Everything runs in .venv, which scripts/env.sh makes; only Python 3.11+ is needed.
#
# PYTHON=python3.12   another interpreter
# ARGS='-k digest'    more arguments for pytest, or for the quick start; of test-engines and test-hosts, "-m ''" runs the longest, too
# WORKERS=4           processes that share the tests, 2 by default
# STEPS=3 MODEL=path  the quick start's length and its checkpoint

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv fmt lint types kernels check test test-full test-engines test-hosts ci quickstart proto dist clean

PY := .venv/bin/python
WORKERS ?= 2
SHARED = -m pytest -n $(WORKERS) --dist loadfile
PYTEST = $(PY) $(SHARED) $(ARGS)
REAL = bin/python $(SHARED) -m "not full" $(ARGS)

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

kernels: venv # compiled once, by all processors; else each process of the tests compiles them for itself
	@.venv/bin/weight-sync warm --workers $(WORKERS)

check: lint types kernels ## The gate: format, lint, types and the fast tests
	$(PYTEST) -m "not slow and not full"

test: venv kernels ## All tests but the longest
	$(PYTEST) -m "not full"

test-full: venv kernels ## All tests, those that wait for minutes too
	$(PYTEST)

test-engines: ## Tests on real engines, each in an environment of its own (downloads about 1.5 GB once)
	@scripts/env.sh vllm .venv-vllm >/dev/null
	.venv-vllm/$(REAL) tests/engines/test_vllm*.py
	@scripts/env.sh verl .venv-verl >/dev/null # verl's vLLM, 0.29, is the oldest one; test-hosts runs it
	.venv-verl/$(REAL) tests/engines/test_vllm_interface.py
	@scripts/env.sh sglang .venv-sglang >/dev/null
	.venv-sglang/$(REAL) tests/engines/test_sglang*.py

test-hosts: ## Tests in real trainers, each in an environment of its own (downloads about 3 GB once; slime with SLIME_SRC=checkout)
	@scripts/env.sh verl .venv-verl >/dev/null
	.venv-verl/$(REAL) tests/hosts/verl
	@scripts/env.sh openrlhf .venv-openrlhf >/dev/null
	.venv-openrlhf/$(REAL) tests/hosts/openrlhf
	@[ -z "$$SLIME_SRC" ] || scripts/env.sh slime .venv-slime >/dev/null
	.venv-$$([ -n "$$SLIME_SRC" ] && echo slime || echo verl)/$(REAL) tests/hosts/slime

# On a shared machine a test may meet its own limit in time: it is run once more there, and the summary says so.
ci: SHARED += --reruns 1
ci: lint types test test-engines test-hosts ## The gate and all tests, nothing twice; a test that fails is run once more and listed

quickstart: venv ## Trains a small real model and serves what was trained (STEPS=3 MODEL=path)
	$(PY) examples/quickstart/run.py $(if $(STEPS),--steps $(STEPS)) $(if $(MODEL),--model "$(MODEL)") $(ARGS)

proto: ## Regenerates proto/v1/*_pb2.py from the .proto files
	PYTHON="$$(scripts/env.sh proto)/bin/python" scripts/gen_proto.sh

dist: venv ## Wheel and sdist, in dist/
	rm -rf dist build/lib build/bdist.*
	$(PY) -m build --no-isolation

clean: ## Removes all that is built here; the shared environments in the cache stay
	rm -rf .venv .venv-* .venv*.lock build dist weight_sync.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
