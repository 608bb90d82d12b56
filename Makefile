# Needs python3 and make; everything else goes into .venv by itself, one environment for each version
# of Python. `make test PYTHON=python3.13` takes another Python than the default.
#
#   make demo       train a small model on 4 virtual replicas
#   make test       every check and every test
#   make lint       the checks alone
#   make test-slow  the tests that `make test` leaves out
#   make test-workers  all tests of several processes
#   make chaos      300 faults in trainings that are started again and again; a table of what came of it
#   make recovery   the time from a killed worker to the next step, also in torchrun and Ray (large downloads)
#   make chaos-stores  the part of it that commits to emulated object stores
#   make peers      the same faults in replicax, TensorFlow and torch DDP; a table (large downloads)
#   make soak       long and large runs: memory, files and threads stay as they are
#   make test-newest   the checks, core, laws, integrations and train, with the newest Python that is installed
#   make test-oldest   the core with the oldest JAX that pyproject.toml allows
#   make test-with JAX=0.11   core, laws, integrations and train with that JAX, the newest of all else
#   make test-nightly LIBRARY=jax   the same with the main branch of jax, keras or flax
#   make test-foreign  the tests with other libraries' datasets (large downloads)
#   make test-keras  Keras's own tests, beside replicax and in a scope (over an hour)
#   make test-flax  Flax's own tests, beside replicax and in a scope
#   make test-public SOURCES=DIR  public programs of keras-io, flax and equinox, which DIR has; a table
#   make test-jax   JAX's own tests, beside replicax and after a strategy was used; JAX_SOURCE names a checkout of JAX
#   make test-clusters  workers under Slurm, Open MPI, MPICH, torchrun and Ray, which it installs (as root)
#   make test-stores  checkpoints and data behind gs:// and s3://, with emulators that it installs
#   make docs       the documentation site, in docs/_build
#   make bench      the speed tables, against TensorFlow and PyTorch where pip has them, with JSON and plots
#   make bench-quick  a few points of them against benchmarks/curves.json; fails if far slower
#   make dist       the sdist and the wheel, tried in a new environment
#   make constraints  renew the versions that make installs for PYTHON: constraints/3.11.txt and so on

PYTHON ?= python3
PYTEST_WORKERS ?= 2

# An environment cannot change its Python, so each version has its own, and its own constraints: JAX
# 0.11 and newer do not install on Python 3.11.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(VERSION),)
    $(error $(PYTHON) does not run; name a Python that does: make PYTHON=/path/to/python3)
endif
VENV := .venv/$(VERSION)
CONSTRAINTS := constraints/$(VERSION).txt
PYTEST = -m pytest -q -n $(PYTEST_WORKERS) --dist worksteal -m "not slow and not foreign and not soak"
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# $(call INSTALL,ENVIRONMENT,GROUPS,ARGUMENTS of pip): replicax with dependency groups of pyproject.toml.
# `pip install --group` would need pip 25.1.
INSTALL = $(PYTHON) .ci/requirements $(2) > $(1)/requirements.txt && \
    $(1)/bin/python $(PIP_INSTALL) $(3) -r $(1)/requirements.txt
RUN := $(CURDIR)/$(VENV)/bin
export PATH := $(RUN):$(PATH)
# The installed pyright is the one we want: no look-up of a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# Everything here runs on virtual CPU devices; an installed libtpu would look for TPUs first.
export JAX_PLATFORMS ?= cpu

.PHONY: constraints demo dist test lint pytest pytest-core test-core test-slow test-workers chaos recovery chaos-stores peers soak \
    test-clusters test-stores test-foreign test-flax test-jax test-keras test-public test-newest test-nightly test-oldest test-with docs bench bench-quick clean

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
	python $(PYTEST)

OLDEST_JAX := $(shell sed -n 's/.*"jax>=\([0-9.]*\),.*/\1/p' pyproject.toml)
JAX ?= $(OLDEST_JAX)

# The parts that a version of JAX, Keras or Flax can break; the rest hardly touches them. The two files that
# are left out kill and restart processes for minutes.
VERSION_TESTS := tests/test_jax_private.py tests/state tests/functions \
    tests/strategy tests/values tests/context tests/collectives tests/laws tests/integrations tests/train \
    --ignore=tests/train/test_exact.py --ignore=tests/train/test_preemption.py

pytest-core: $(VENV)/.dev
	python $(PYTEST) $(VERSION_TESTS)

test-core: lint pytest-core

test-newest:
	$(MAKE) PYTHON="$$(.ci/newest-python)" test-core

test-with: $(VENV)-jax-$(JAX)/.done
	$(VENV)-jax-$(JAX)/bin/python $(PYTEST) $(VERSION_TESTS)

# Without constraints: the main branch of one library, over the newest releases of all others. Its
# version may lie above the range of pyproject.toml, hence --no-deps.
LIBRARY ?= jax
NIGHTLY_jax := git+https://github.com/jax-ml/jax
NIGHTLY_keras := git+https://github.com/keras-team/keras
NIGHTLY_flax := git+https://github.com/google/flax
test-nightly:
	rm -rf $(VENV)-nightly && $(PYTHON) -m venv $(VENV)-nightly
	$(call INSTALL,$(VENV)-nightly,test,-e .)
	$(VENV)-nightly/bin/python $(PIP_INSTALL) --upgrade --no-deps $(NIGHTLY_$(LIBRARY))
	$(VENV)-nightly/bin/python -m pip list | grep -i -E '^(jax|jaxlib|keras|flax|orbax-checkpoint) '
	$(VENV)-nightly/bin/python $(PYTEST) $(VERSION_TESTS)

test-slow: $(VENV)/.dev
	python -m pytest -q -m "slow and not foreign"

# Other libraries in a venv of their own: they are large, and nobody else needs them.
test-foreign: $(VENV)-foreign/.done
	$(VENV)-foreign/bin/python -m pytest -q -m "not slow" tests/foreign

test-keras: $(VENV)-foreign/.done
	$(VENV)-foreign/bin/python -m pytest -q tests/foreign/test_keras_own.py

test-flax: $(VENV)-foreign/.done
	$(VENV)-foreign/bin/python -m pytest -q tests/foreign/test_flax_own.py

# One program after another; `--json` lets an interrupted run continue. PUBLIC has more arguments.
test-public: $(VENV)-foreign/.done
	PYTHONPATH=$(CURDIR) $(VENV)-foreign/bin/python -m tests.foreign.public --json public.json \
	    --keras-io $(SOURCES)/keras-io --flax $(SOURCES)/flax --equinox $(SOURCES)/equinox $(PUBLIC)

test-jax: $(VENV)/.dev
	python -m pytest -q tests/foreign/test_jax_own.py

# The lower end of the range of JAX; constraints/ pins the upper end.
test-oldest: $(VENV)-jax-$(OLDEST_JAX)/.done
	$(VENV)-jax-$(OLDEST_JAX)/bin/python -m pytest -q -n $(PYTEST_WORKERS) -m "not slow" tests/test_jax_private.py \
	    tests/state tests/functions tests/strategy tests/values tests/context tests/collectives

test-workers: $(VENV)/.dev
	python -m pytest -q -n $(PYTEST_WORKERS) --dist worksteal -m multi_process tests

# One test starts many processes one after another, and may take long on a busy machine.
PATIENT := -o faulthandler_timeout=3600

# The launchers of Debian, if apt-get is here and may install; tests of those that are missing are skipped.
LAUNCHERS := openmpi-bin mpich slurm-wlm munge openssh-server iproute2 iptables procps
LAUNCHER_COMMANDS := mpirun.openmpi mpirun.mpich srun munged sshd ip iptables sysctl
test-clusters: $(VENV)-clusters/.done
	for command in $(LAUNCHER_COMMANDS); do command -v $$command >/dev/null || exit 1; done || \
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(LAUNCHERS); } || \
	    echo "Cannot install $(LAUNCHERS): their tests will be skipped."
	PATH=$(CURDIR)/$(VENV)-clusters/bin:$$PATH python -m pytest -q -rs $(PATIENT) -m clusters tests/clusters

test-stores: $(VENV)-stores/.done
	$(VENV)-stores/bin/python -m pytest -q $(PATIENT) -m stores tests/stores

CHAOS ?= --faults 300
CHAOS_ELASTIC ?= --faults 300 --seconds 7200
chaos: $(VENV)/.dev chaos-stores
	PYTHONPATH=$(CURDIR) python -m tests.chaos $(CHAOS)
	PYTHONPATH=$(CURDIR) python -m tests.chaos.elastic $(CHAOS_ELASTIC)

# Without torch and Ray, their rows are left out.
recovery: $(VENV)/.dev
	$(MAKE) $(VENV)-clusters/.done || echo "No torch and Ray here: their rows will be left out."
	PYTHONPATH=$(CURDIR) python -m tests.chaos.recovery $(RECOVERY) $$(test -e $(VENV)-clusters/.done && \
	    echo --peers $(CURDIR)/$(VENV)-clusters/bin/python)

CHAOS_STORES ?= --faults 28 --each 7
chaos-stores: $(VENV)-stores/.done
	for store in s3 gs; do PYTHONPATH=$(CURDIR) $(VENV)-stores/bin/python -m tests.chaos --store $$store \
	    --out chaos-$$store.jsonl $(CHAOS_STORES) || exit 1; done

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

# Whether the newest versions that pyproject.toml allows work, `make test` says afterwards.
constraints:
	rm -rf $(VENV)-new && $(PYTHON) -m venv $(VENV)-new
	$(call INSTALL,$(VENV)-new,dev docs,-e '.[preflight]' hatchling editables)
	{ echo '# Every version that `make` installs for Python $(VERSION). Renew: `make constraints`.'; \
	  $(VENV)-new/bin/python -m pip freeze --exclude-editable; } > $(CONSTRAINTS)
	rm -rf $(VENV)-new

clean:
	rm -rf .venv bench docs/_build docs/api .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

constraints/%.txt:
	@echo "replicax is not tested with Python $*: there is no $@. Name another Python with" \
	    "make PYTHON=..., or try this one: make constraints, then make test." >&2; exit 1

# One stamp per extra or group; the constraints pin every version, the build tools included.
$(VENV)/.demo: pyproject.toml $(CONSTRAINTS) | $(VENV)/pyvenv.cfg
	PIP_CONSTRAINT=$(CONSTRAINTS) python $(PIP_INSTALL) -e '.[demo]'
	touch $@

$(VENV)/.dev $(VENV)/.docs: $(VENV)/.%: pyproject.toml $(CONSTRAINTS) | $(VENV)/pyvenv.cfg
	export PIP_CONSTRAINT=$(CONSTRAINTS); $(call INSTALL,$(VENV),$*,-e .)
	touch $@

# The TPU compiler (200 MB), for the tests of preflight; where it cannot be had they are skipped.
$(VENV)/.preflight: pyproject.toml $(CONSTRAINTS) | $(VENV)/.dev
	PIP_CONSTRAINT=$(CONSTRAINTS) python $(PIP_INSTALL) -e '.[preflight]' \
	    || echo "No TPU compiler here: the tests of preflight will be skipped."
	touch $@

# What replicax is compared with, each in an environment of its own.
TENSORFLOW := tensorflow-cpu==2.21.0
TORCH := torch==2.13.0
$(VENV)-tensorflow/.done $(VENV)-torch/.done: $(VENV)-%/.done:
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python $(PIP_INSTALL) numpy $(if $(filter torch,$*),$(TORCH),$(TENSORFLOW))
	touch $@

$(VENV)-foreign/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)-foreign
	$(call INSTALL,$(VENV)-foreign,test foreign,$(TORCH) -e .)
	touch $@

$(VENV)-clusters/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)-clusters
	$(call INSTALL,$(VENV)-clusters,test,$(TORCH) 'ray[train]' distributed kubernetes kubernetes-validate \
	    kubeflow-trainer-api submitit ipyparallel -e .)
	$(VENV)-clusters/bin/python $(PIP_INSTALL) --target $(VENV)-clusters/mpi4py mpi4py  # for some tests only
	touch $@

$(VENV)-stores/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)-stores
	$(call INSTALL,$(VENV)-stores,test stores,-e .)
	touch $@

$(VENV)-jax-%/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)-jax-$*
	$(call INSTALL,$(VENV)-jax-$*,test,'jax==$*.*' -e .)
	touch $@

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)
