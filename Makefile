# Every target sets up what it needs: a fresh clone and `make serve` or `make test` are enough.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 30000

.PHONY: serve test unit fmt lint types clients browser bench peers lock clean

serve: $(VENV)/run.stamp
	$(BIN)/antiphon serve

test: lint types unit

unit: $(VENV)/dev.stamp
	$(BIN)/antiphon pull --profile default --language-model smollm2-135m-instruct
	$(BIN)/python -m pytest

fmt: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix src tests bench examples
	$(BIN)/ruff format src tests bench examples

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check src tests bench examples
	$(BIN)/ruff format --check src tests bench examples

types: $(VENV)/dev.stamp
	$(BIN)/mypy

# Third-party clients in environments of their own (1 GB) against a real server.
clients: $(VENV)/dev.stamp
	$(BIN)/python tests/clients/run.py

# The page in headless Chromium, which the system has to have.
browser: $(VENV)/dev.stamp
	$(BIN)/python tests/browser/run.py

bench: $(VENV)/dev.stamp
	$(BIN)/antiphon bench asr

peers:
	bench/peers/setup.sh realtimestt
	bench/peers/setup.sh whisperlivekit
	bench/peers/setup.sh xllamacpp
	bench/peers/setup.sh piper
	bench/peers/setup.sh pocketsphinx

# The lock is what `make serve` and `make test` install; `make lock` writes it anew from pyproject.toml.
lock:
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip setuptools
	$(BIN)/python -m pip install -q -e '.[dev]'
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//' | sort -f > requirements.lock

$(VENV)/pip.stamp:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	touch $@

$(VENV)/run.stamp: $(VENV)/pip.stamp requirements.lock pyproject.toml
	$(BIN)/python -m pip install -q -c requirements.lock -e .
	touch $@

$(VENV)/dev.stamp: $(VENV)/pip.stamp requirements.lock pyproject.toml
	$(BIN)/python -m pip install -q -c requirements.lock -e '.[dev]'
	touch $@ $(VENV)/run.stamp

clean:
	rm -rf $(VENV) build dist
