# The words that people type; CI runs the same ones. Run `make demo` and `make test` as root: the lab boots real hosts.
PYTHON ?= python3
BIN := .venv/bin
N ?= 3

.PHONY: setup demo test test-faults lint lab lab-down bench

setup: .venv/ready

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || apt-get install --yes --quiet python3-venv
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(BIN)/python -m compileall -q kernelswap roles
	@touch $@

demo: setup
	lab/demo.sh

test: setup lint
	tests/agent/python39.sh
	$(BIN)/pytest --numprocesses 2 --dist loadgroup -m 'not exhaustive'

# The whole fault matrix, and its summary for the docs.
test-faults: setup
	KERNELSWAP_FAULTS_SUMMARY=docs/faults.md $(BIN)/pytest tests/lab/faults

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lab: setup
	lab/lab.sh up $(N)

lab-down:
	lab/lab.sh down

bench: setup
	$(BIN)/python -m benchmarks
