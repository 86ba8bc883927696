# Everything from a fresh clone, on a machine with Python 3.10 to 3.13 (with venv) and g++:
#
#   make demo    trains ResNet-50 under a memory cap that it otherwise exceeds, and shows before and after
#   make test    runs the tests
#   make test-fast  runs those that need no TensorFlow, in under a minute
#   make test-oldest  runs a part of them with the oldest TensorFlow that is supported
#   make lint    ruff, pyright, and who may import whom
#   make docs    builds the documentation into site/, strictly
#   make wheels  a release's wheels into dist/; VERSIONS="2.20.0 2.21.0" says for which TensorFlows
#   make sanitize  builds the C++ with sanitizers and runs its tests (tests/support/sanitize.py)
#
# Each makes .venv first. PYTHON=python3.12 chooses the interpreter, TENSORFLOW=gpu a TensorFlow for GPUs
# (cpu by default; see the extras in pyproject.toml), VERSION=2.19.1 a release other than the newest (give it an
# environment of its own: VENV=.venv-2.19.1), PYTEST_ARGS="-k swap" what is tested; "-m slow" tests what takes minutes and
# is left out by default. Three processes run tests, since a test leaves a core idle for a quarter of its time, and end
# together; PYTEST_ARGS="-n 0" has one.

PYTHON ?= python3
TENSORFLOW ?= cpu
VERSION ?=
PYTEST_ARGS ?=
VENV := .venv
SITE := $(CURDIR)/site
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
PINNED := $(if $(VERSION),$(if $(filter cpu,$(TENSORFLOW)),tensorflow-cpu,tensorflow)==$(VERSION))

# TensorFlow 2.18 is the oldest in pyproject.toml's range. These files use most of its internals.
OLDEST := 2.18.1
OLDEST_TESTS := frontends/test_optimize frontends/test_optimize_gradients ops/test_loop_ops ops/test_emulated_gpu

# Each process of a test would compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-oldest oldest lint docs wheels sanitize format clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(VENV)/plot
	$(BIN)/python examples/train_under_cap.py --plot train_under_cap.png

test: $(VENV)/test
	$(BIN)/python -m pytest -n 3 --dist worksteal $(PYTEST_ARGS)

test-fast: $(VENV)/test
	$(BIN)/python -m pytest -n 0 -m fast --without-tensorflow tests/unit $(PYTEST_ARGS)

test-oldest: oldest
	$(MAKE) test VENV=$(VENV)-oldest VERSION=$(OLDEST) PYTEST_ARGS="$(OLDEST_TESTS:%=tests/%.py) $(PYTEST_ARGS)"

oldest: # its environment alone
	$(MAKE) $(VENV)-oldest/test VENV=$(VENV)-oldest VERSION=$(OLDEST)

lint: $(VENV)/test $(VENV)/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --project . --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir $(SITE)

wheels: $(VENV)/release
	$(BIN)/python release/wheels.py dist --tensorflow $(VERSIONS)

sanitize: $(VENV)/test
	$(BIN)/python tests/support/sanitize.py

format: $(VENV)/lint
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-oldest build dist site *.egg-info train_under_cap.png

# An empty file stands for each installed extra. Editable, so that a changed source needs no new install.
$(VENV)/plot $(VENV)/test $(VENV)/lint $(VENV)/docs $(VENV)/release: $(VENV)/%: $(VENV)/base
	@echo "installing what '$*' needs, with TensorFlow ($(TENSORFLOW)): a minute or so, once ..."
	$(PIP) --editable ".[$(TENSORFLOW),$*]" $(PINNED)
	@touch $@

$(VENV)/base: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(not (3, 10) <= v[:2] <= (3, 13) and \
	    f"tfswap needs Python 3.10 to 3.13, and {sys.executable} is {v[0]}.{v[1]}: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@touch $@
