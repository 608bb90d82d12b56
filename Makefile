# Needs python3 and make; everything else goes into .venv by itself.
#
#   make demo       train a small model on 4 virtual replicas
#   make test       every check and every test
#   make lint       the checks alone
#   make test-slow  the tests that `make test` leaves out
#   make test-workers  all tests of several processes
#   make chaos      300 faults in trainings that are started again and again; a table of what came of it
#   make peers      the same faults in replicax, TensorFlow and torch DDP; a table (large downloads)
#   make soak       long and large runs: memory, files and threads stay as they are
#   make test-oldest   the core with the oldest JAX that pyproject.toml allows
#   make test-foreign  the tests with other libraries' datasets (large downloads)
#   make test-keras  Keras's own tests, with and without a strategy around each (about an hour)
#   make docs       the documentation site, in docs/_build
#   make bench      the speed tables, against TensorFlow and PyTorch where pip has them, with JSON and plots
#   make bench-quick  a few points of them against benchmarks/curves.json; fails if far slower
#   make dist       the sdist and the wheel, tried in a new environment
#   make constraints  renew the versions that constraints.txt pins

PYTHON ?= python3
PYTEST_WORKERS ?= 2

VENV := .venv
RUN := $(CURDIR)/$(VENV)/bin
export PATH := $(RUN):$(PATH)
# The installed pyright is the one we want: no look-up of a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Everything here runs on virtual CPU devices; an installed libtpu would look for TPUs first.
export JAX_PLATFORMS ?= cpu

.PHONY: constraints demo dist test lint pytest test-slow test-workers chaos peers soak test-foreign test-keras test-oldest docs bench bench-quick clean

demo: $(VENV)/.demo
	python examples/digits.py

test: lint pytest

lint: $(VENV)/.dev
	ruff check
	ruff format --check
	mypy
	pyright
	lint-imports

pytest: $(VENV)/.dev $(VENV)/.preflight
	python -m pytest -q -n $(PYTEST_WORKERS) --dist worksteal -m "not slow and not foreign and not soak"

test-slow: $(VENV)/.dev
	python -m pytest -q -m "slow and not foreign"

# Other libraries in a venv of their own: they are large, and nobody else needs them.
test-foreign: $(VENV)-foreign/.done
	$(VENV)-foreign/bin/python -m pytest -q -m "not slow" tests/foreign

test-keras: $(VENV)-foreign/.done
	$(VENV)-foreign/bin/python -m pytest -q tests/foreign/test_keras_own.py

# The lower end of the range of JAX; the other end is what constraints.txt pins for all else.
test-oldest: $(VENV)-oldest/.done
	$(VENV)-oldest/bin/python -m pytest -q -n $(PYTEST_WORKERS) -m "not slow" tests/test_jax_private.py \
	    tests/state tests/functions tests/strategy tests/values tests/context tests/collectives

test-workers: $(VENV)/.dev
	python -m pytest -q -n $(PYTEST_WORKERS) --dist worksteal -m multi_process tests

CHAOS ?= --faults 300
chaos: $(VENV)/.dev
	PYTHONPATH=$(CURDIR) python -m tests.chaos $(CHAOS)

peers: $(VENV)/.dev $(VENV)-tensorflow/.done $(VENV)-torch/.done
	PYTHONPATH=$(CURDIR) python -m tests.chaos.peers $(PEERS) \
	    --tensorflow $(VENV)-tensorflow/bin/python --torch $(VENV)-torch/bin/python

soak: $(VENV)/.dev
	python -m pytest -q -m soak tests

docs: $(VENV)/.docs
	python -m sphinx --fail-on-warning --keep-going -q -b html docs docs/_build

# Where a peer cannot be had, its rows are left out.
bench: $(VENV)/.dev
	for peer in tensorflow torch; do \
	    $(MAKE) $(VENV)-$$peer/.done || echo "No $$peer here: its rows will be left out."; \
	done
	python -m benchmarks --out $(CURDIR)/bench $$(for peer in tensorflow torch; do \
	    test -e $(VENV)-$$peer/.done && echo --$$peer $(CURDIR)/$(VENV)-$$peer/bin/python; done)

bench-quick: $(VENV)/.dev
	python -m benchmarks.curves --quick --against benchmarks/curves.json

dist:
	PYTHON=$(PYTHON) .ci/dist

# What the newest versions are that pyproject.toml allows; `make test` then says whether they work.
constraints:
	rm -rf $(VENV)-new && $(PYTHON) -m venv $(VENV)-new
	$(VENV)-new/bin/python -m pip install --quiet --disable-pip-version-check \
	    -e '.[dev,preflight,plot]' hatchling editables
	{ echo '# Every version that `make` installs. Renew: `make constraints`.'; \
	  $(VENV)-new/bin/python -m pip freeze --exclude-editable; } > constraints.txt
	rm -rf $(VENV)-new

clean:
	rm -rf $(VENV) bench docs/_build docs/api .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

# One stamp per set of extras; constraints.txt pins every version, the build tools included.
$(VENV)/.demo $(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/pyvenv.cfg
	PIP_CONSTRAINT=constraints.txt python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	touch $@

# The TPU compiler (200 MB), for the tests of preflight; where it cannot be had they are skipped.
$(VENV)/.preflight: pyproject.toml constraints.txt | $(VENV)/.dev
	PIP_CONSTRAINT=constraints.txt python -m pip install --quiet --disable-pip-version-check \
	    -e '.[preflight,plot]' || echo "No TPU compiler here: the tests of preflight will be skipped."
	touch $@

# What replicax is compared with, each in an environment of its own.
TENSORFLOW := tensorflow-cpu==2.21.0
TORCH := torch==2.13.0
$(VENV)-tensorflow/.done $(VENV)-torch/.done: $(VENV)-%/.done:
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	    numpy $(if $(filter torch,$*),$(TORCH),$(TENSORFLOW))
	touch $@

$(VENV)-foreign/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)-foreign
	$(VENV)-foreign/bin/python -m pip install --quiet --disable-pip-version-check \
	    $(TORCH) -e '.[test,foreign]'
	touch $@

OLDEST_JAX := $(shell sed -n 's/.*"jax>=\([0-9.]*\),.*/\1/p' pyproject.toml)

$(VENV)-oldest/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
	    jax==$(OLDEST_JAX) -e '.[test]'
	touch $@

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)
