# The few verbs a person needs; `make` alone lists them. Everything runs from .venv, which `setup` makes from
# requirements.lock and requirements-shioaji.lock.
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
#: Processes of the tests, each with servers of its own: more than cores, since most tests wait most of the time.
#: tests/groups.py says what they get as a unit, and in which order. One that dies ends the run: pytest-xdist
#: never ends a run in which it replaced one.
JOBS ?= 3
#: The broker's SDK: `fallback` takes the newest release allowed, or none, when the index no longer has the pinned
#: one; `pinned` fails then; `none` leaves it out (infra/images/install_shioaji.py).
SHIOAJI ?= fallback

# Compiled modules are kept whatever the environment says: hundreds of processes of ours are started, and each
# would compile its modules again (0.3 s of CPU for an orchestrator or an API; 2 ms for each start of a workflow).
unexport PYTHONDONTWRITEBYTECODE
# A shell may hold variables for other projects: these would put other code before ours, or installed packages
# elsewhere than into .venv. Indexes, proxies and certificates stay.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONOPTIMIZE PYTHONUSERBASE VIRTUAL_ENV
unexport PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT PIP_NO_DEPS PIP_REQUIRE_VIRTUALENV PIP_EDITABLE
# Neither may a pip.conf for other projects. Options override it, variables only if they are not empty; pip
# takes an empty --prefix or --root for a relative one.
INTO_VENV := --no-user --target= --prefix="$(CURDIR)/.venv" --root=/
PIP_ENV := PIP_NO_DEPS=0 PIP_REQUIRE_HASHES=0 PIP_DRY_RUN=0
PIP_INSTALL := $(PIP_ENV) $(BIN)/python -m pip install --quiet --disable-pip-version-check $(INTO_VENV)

.PHONY: help run test quick check bench aws shell setup clean lock sbom

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: setup ## Start the whole system, run the main job, stay up until Ctrl-C (ONCE=1: stop after the job)
	@$(BIN)/berth up --main-job $(if $(ONCE),--once)

test: setup ## The suite, on real servers (ARGS="tests/unit -k name" chooses; ARGS=tests: with all drills)
	@$(BIN)/python -m pytest --ignore tests/aws --numprocesses $(JOBS) --dist loadscope --no-loadscope-reorder \
	  --max-worker-restart 0 $(or $(ARGS),-m "not drill")

quick: check ## What a change needs, in under 2 minutes: `check`, then the unit tests of all but the lab
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder \
	  --max-worker-restart 0 --quiet tests/unit --ignore tests/unit/bench --ignore tests/unit/chaos $(ARGS)

check: setup ## Lint, types, imports between layers, names and phrases, the documents
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python .ci/check_names.py
	@$(BIN)/python .ci/check_phrases.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: setup ## All benchmarks, one after the other
	@$(BIN)/berth bench all

aws: setup ## Synthesise both AWS stages into infra/aws/cdk.out, and test them (docs/how-to/deploy-on-aws.md)
	@command -v node >/dev/null || { echo "make aws needs Node: apt install nodejs"; exit 1; }
	@$(PIP_INSTALL) -r infra/aws/requirements.lock
	@$(BIN)/python -m infra.aws.app infra/aws/cdk.out
	@$(BIN)/cfn-lint --config-file infra/aws/.cfnlintrc
	@$(BIN)/python -m pytest --quiet tests/aws

shell: setup ## A shell that finds `berth` and the other programs of .venv (exit leaves it)
	@echo "berth is $(CURDIR)/$(BIN)/berth; in this shell it is found by its name"
	@PATH="$(CURDIR)/$(BIN):$$PATH" VIRTUAL_ENV="$(CURDIR)/.venv" $${SHELL:-/bin/sh}

# A copied or moved checkout has the programs of the place where its .venv was made: the stamp names that place.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): new-place
endif
.PHONY: new-place
new-place:

setup: $(STAMP) ## Make or renew .venv; the other commands do it by themselves

$(STAMP): requirements.lock requirements-shioaji.lock pyproject.toml infra/client/pyproject.toml infra/berth_jobs/pyproject.toml infra/berth_testing/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Berth needs Python 3.11 or later; set PYTHON=…")'
	@test "$$(cat $(STAMP) 2>/dev/null)" = "$(CURDIR)" && $(BIN)/python -m pip --version >/dev/null 2>&1 || \
	  $(PYTHON) -m venv --clear .venv
	@echo "installing pinned dependencies into .venv"
	@$(PIP_INSTALL) -r requirements.lock
	@$(PIP_ENV) $(BIN)/python infra/images/install_shioaji.py $(SHIOAJI) $(INTO_VENV)
	@PYTHONWARNINGS=ignore $(PIP_INSTALL) --no-deps --no-build-isolation -e . -e infra/client -e infra/berth_jobs -e infra/berth_testing
	@echo "$(CURDIR)" >$(STAMP)

PINNED := --quiet --allow-unsafe --strip-extras --generate-hashes --no-emit-index-url --no-emit-find-links --no-emit-trusted-host
lock: setup ## Pin anew what pyproject.toml asks for
	@$(BIN)/pip-compile $(PINNED) $(foreach one,bench dev docs local server,--extra $(one)) \
	  --output-file requirements.lock pyproject.toml
	@$(BIN)/python -c 'from infra.images.install_shioaji import requirement; print(requirement())' | \
	  $(BIN)/pip-compile $(PINNED) --upgrade --output-file requirements-shioaji.lock -
	@$(BIN)/pip-compile $(PINNED) --extra aws --constraint requirements.lock \
	  --output-file infra/aws/requirements.lock pyproject.toml

# The Python packages of each image, with their hashes; those of its base image are the base's to tell.
sbom: setup ## Write the SBOM (CycloneDX) of each image into sbom/
	@mkdir -p sbom
	@for image in "server server" "node server shioaji" "worker shioaji"; do set -- $$image; name=$$1; shift; \
	  $(BIN)/python infra/images/requirements.py $$@ > sbom/$$name.txt && \
	  $(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --mc-type application --output-reproducible \
	    --output-format JSON --output-file sbom/$$name.cdx.json sbom/$$name.txt || exit 1; done; ls sbom

clean: ## Remove all local data and the environment
	@test ! -x $(BIN)/berth || $(BIN)/berth down --quiet
	@rm -rf .berth .venv
