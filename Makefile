# The few verbs a person needs. Everything runs from .venv, which `setup` makes from requirements.lock.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
#: Each has servers of its own; the long tests come first, so that none ends alone. One that dies ends the
#: run (no restart): pytest-xdist waits for ever at the end of a run in which it replaced one.
JOBS ?= 2

.PHONY: run test check bench setup clean lock

run: setup ## Start the whole system, run the main job, stay up until Ctrl-C (ONCE=1: stop after the job)
	@$(BIN)/berth up --main-job $(if $(ONCE),--once)

# Compiled modules are kept whatever the environment says: hundreds of processes of ours are started, and each
# would compile its modules again (0.3 s of CPU for an orchestrator or an API).
test: setup ## The whole suite, on real servers, by JOBS processes (ARGS="tests/unit -k name" chooses)
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadscope --no-loadscope-reorder \
	  --max-worker-restart 0 $(ARGS)

check: setup ## Lint, types, arrows between the rooms
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

bench: setup ## All benchmarks, one after the other
	@$(BIN)/berth bench all

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Berth needs Python 3.11 or later; set PYTHON=…")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "installing pinned dependencies into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(STAMP)

lock: setup ## Pin anew what pyproject.toml asks for
	@$(BIN)/pip-compile --quiet --all-extras --allow-unsafe --strip-extras --no-emit-index-url \
	  --no-emit-find-links --no-emit-trusted-host --output-file requirements.lock pyproject.toml

clean: ## Remove all local data and the environment
	@test ! -x $(BIN)/berth || $(BIN)/berth down --quiet
	@rm -rf .berth .venv
