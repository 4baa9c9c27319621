# Everything is run from .venv, which `make setup` builds from requirements.lock.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
# ARGS reaches pytest: make test ARGS="-k simulate -x"
# Each worker begins with its half of the files, so that what a module has planned or compiled is there for its tests.
# Bytecode is written, whatever the environment says: a hundred processes that tests start read it.
PYTEST = PYTHONDONTWRITEBYTECODE= JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist worksteal

# `make setup PYTHON=/path/to/python3.12` chooses the interpreter; otherwise the first of these that is new enough.
PYTHON ?=
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11 python)

# Pyright asks the network for a newer version of itself on every run unless this is set.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup test test-quick test-slow test-newest browser lint package release format demo bench docs lock clean distclean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  make %-10s %s\n", $$1, $$2 }'

setup: $(STAMP) ## build .venv from requirements.lock, with the project installed editable

# An existing .venv is kept and brought up to the lock, never rebuilt: only `make distclean` removes it.
$(STAMP): requirements.lock pyproject.toml
	@set -eu; \
	if [ ! -x $(BIN)/python ]; then \
		chosen=; \
		for candidate in $(CANDIDATES); do \
			if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
				chosen=$$candidate; break; \
			fi; \
		done; \
		if [ -n "$$chosen" ]; then \
			echo "building $(VENV) with $$("$$chosen" --version)"; \
			"$$chosen" -m venv $(VENV); \
		elif [ -z "$(PYTHON)" ] && command -v uv >/dev/null 2>&1; then \
			uv venv --seed --python '>=3.11' $(VENV); \
		else \
			echo "make setup: jaxremat needs Python 3.11 or newer with its venv module; looked for: $(CANDIDATES)." >&2; \
			echo "Install one (on Debian and Ubuntu, python3-venv too), or name it: make setup PYTHON=/path/to/python3.12" >&2; \
			exit 1; \
		fi; \
	fi; \
	if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		echo "make setup: $(VENV) does not hold a working Python 3.11 or newer; remove it with: make distclean" >&2; \
		exit 1; \
	fi
	@set -eu; \
	if command -v uv >/dev/null 2>&1; then \
		install="uv pip install --python $(BIN)/python"; \
	else \
		$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip --upgrade; \
		install="$(BIN)/python -m pip install --quiet --disable-pip-version-check"; \
	fi; \
	echo "installing requirements.lock (jax, flax, a MILP solver and a GPU compiler: about 2.6 GB on disk)"; \
	$$install -r requirements.lock; \
	$$install --no-deps -e .
	@touch $@

test: setup ## the fast tests, on the CPU
	$(PYTEST) --durations=20 $(ARGS)

# At most a minute and a half: files of every room, and golden facts of steps.
QUICK := $(addprefix tests/,test_house.py test_structure.py api/test_bad_input.py api/test_comparison.py \
	api/test_planning.py attention/test_attention_found.py cli/test_doctor.py compiler/test_alive.py \
	compiler/test_devices.py compiler/test_hlo.py compiler/test_roofline.py docs/test_pictures.py \
	emit/test_constraints.py examples/test_ablation.py \
	lower/test_epilogues.py lower/test_loop_memory.py model/test_host_copies.py model/test_levels.py \
	model/test_simulate.py model/test_timeline.py model/test_updates.py plan/test_effort.py \
	plan/test_golden.py plan/test_plan_json.py plan/test_search.py program report/test_report.py \
	rewrite/test_cotangent_chains.py rewrite/test_inverses.py runtime/test_budget.py solver/test_check_solver.py \
	solver/test_hull.py)

test-quick: setup ## some tests of every room
	$(PYTEST) $(QUICK) $(ARGS)

test-slow: setup ## the tests marked slow, and only those
	$(PYTEST) -m slow $(ARGS)

# Python 3.11 has jax 0.10. A newer Python, from the PATH or from pyenv, has a newer jax too. Code that reads or writes
# jaxprs is tested with both, and a little of everything else. Without a newer Python, nothing is tested, and it says so.
NEWER := python3.14 python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python)
READING := $(addprefix tests/,program emit/test_emit.py emit/test_policies.py rewrite/test_calls.py \
	rewrite/test_checkpoints.py rewrite/test_loops.py rewrite/test_selections.py rewrite/test_shard_map_body.py \
	rewrite/test_trace.py rewrite/test_undone_checkpoints.py)
ON_NEWER := $(READING) $(QUICK)

test-newest: ## tests of jaxprs with the newest jax, in an environment of its own
	@set -eu; \
	for candidate in $(NEWER); do \
		if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
			exec $(MAKE) --no-print-directory VENV=$(VENV)/newest PYTHON="$$candidate" \
				test ARGS="$(if $(ARGS),$(ARGS),$(ON_NEWER))"; \
		fi; \
	done; \
	echo "make test-newest: nothing tested, for there is no Python newer than 3.11"

# The tests of HTML reports look at them in a browser, and are skipped without one: CI installs it first.
browser: ## install Chromium for the tests of reports, with apt-get, as root
	@set -eu; \
	if [ -n "$${CHROMIUM-}" ] || command -v chromium chromium-browser google-chrome chrome >/dev/null; then \
		echo "make browser: there is one"; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "make browser: installing Chromium"; \
		apt-get update -qq; \
		DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; \
	else \
		echo "make browser: no apt-get, or not root. Install Chromium, or the tests of reports in it are skipped." >&2; \
	fi

lint: setup ## ruff, the direction of imports, and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright

package: setup ## dist/: a wheel and an sdist, tried in an empty environment (ten minutes; 2 GB in a temporary folder)
	$(BIN)/python tests/package/fresh_environment.py

release: package ## build and try the packages, check version, changelog and metadata, and tag the version; nothing is uploaded
	$(BIN)/python tests/package/release.py

format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: setup ## plan and run a small model in the terminal
	JAX_PLATFORMS=$${JAX_PLATFORMS-cpu} $(BIN)/jaxremat demo

bench: setup ## every script of examples/benchmarks, one after the other
	@set -eu; for script in examples/benchmarks/*.py; do \
		echo "== $$script"; JAX_PLATFORMS=$${JAX_PLATFORMS-cpu} $(BIN)/python "$$script"; \
	done

docs: setup ## build the site into build/docs; a broken link is an error
	NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(BIN)/python -m mkdocs build -f docs/mkdocs.yml
	@echo "read it with: $(BIN)/python -m http.server -d build/docs"

lock: ## update requirements.lock from pyproject.toml (needs uv)
	uv pip compile pyproject.toml --universal --python-version 3.11 --extra demo --extra tools --extra targets --extra docs --group dev \
		--upgrade --custom-compile-command 'make lock' --output-file requirements.lock --quiet

clean: ## remove caches and build outputs; .venv stays
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv too
	rm -rf $(VENV)
