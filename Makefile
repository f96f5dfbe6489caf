# Every target sets up what it needs: a fresh clone and `make serve` or `make test` are enough.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 30000
# Python keeps compiled modules, whatever the environment says. Otherwise every process compiles torch again, for 6 s.
export PYTHONDONTWRITEBYTECODE =

CODE := src tests bench examples docs deploy

.PHONY: help serve test quick affected unit models heavy pure fmt lint types docs clients engines image kernels browser bench chaos compare house peers ray lock release sbom clean

help:  ## Say what there is
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

serve: $(VENV)/run.stamp  ## Fetch the models and serve on http://127.0.0.1:8000
	$(BIN)/antiphon serve

test: $(VENV)/dev.stamp  ## Everything CI runs
	@$(MAKE) --no-print-directory -j2 lint models types docs
	@$(MAKE) --no-print-directory unit

quick: $(VENV)/dev.stamp  ## Lint, types, and the quick tests of what changed since BASE (HEAD): after every change
	@$(MAKE) --no-print-directory -j2 lint types affected

affected: $(VENV)/dev.stamp
	$(BIN)/python -m tests.affected $(if $(BASE),--base $(BASE))

unit: models
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not heavy"

# What the tests load. Rounding a model to int8 takes a minute of one core.
models: $(VENV)/dev.stamp build/oldest-transformers.stamp
	$(BIN)/antiphon pull --profile default
	$(BIN)/antiphon pull --profile default --language-model smollm2-135m-instruct --speaker-model resemblyzer

heavy: models  ## Tests that take half a minute or more each; CI leaves them out
	$(BIN)/python -m pytest -m heavy

pure: $(VENV)/dev.stamp  ## All tests that start no server, load no model and take less than a second
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not server and not slow and not heavy" --durations 5 --durations-min 1

fmt: $(VENV)/dev.stamp  ## Format the code, and mend what the linter can
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

lint: $(VENV)/dev.stamp  ## Check style and format
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(VENV)/dev.stamp  ## Check types, strictly
	$(BIN)/mypy

docs: $(VENV)/dev.stamp  ## Build the documentation site; a dead link fails it
	$(BIN)/sphinx-build -q -n -W --keep-going -c docs -d build/doctrees . build/docs
	@echo "build/docs/index.html"

chaos: $(VENV)/dev.stamp  ## 550 hosts killed and 200 connections cut under callers, then a million mutated inputs
	$(BIN)/python -m tests.cluster.chaos $(HOSTS)
	$(BIN)/python -m tests.cluster.cuts $(CUTS)
	$(BIN)/python -m tests.fuzz $(ARGS)

clients: $(VENV)/dev.stamp  ## Third-party clients in environments of their own (1 GB) against a real server
	$(BIN)/python tests/clients/run.py

engines: $(VENV)/dev.stamp  ## Models on real other servers (llama.cpp, vLLM, Ray Serve LLM, wyoming-piper) behind a real server
	$(BIN)/python tests/engines/run.py $(ARGS)

image: $(VENV)/dev.stamp  ## Build the image with buildah and run it, the compose file and the units with podman
	$(BIN)/python tests/deploy/image.py $(ARGS)
	$(BIN)/python tests/deploy/compose.py $(ARGS)
	$(BIN)/python tests/deploy/units.py $(ARGS)

ray: $(VENV)/dev.stamp  ## Hosts and doors on a real Ray Serve, in an environment of its own (0.4 GB)
	$(BIN)/python tests/ray_serve/run.py $(ARGS)

kernels: $(VENV)/dev.stamp build/triton.stamp  ## The kernels of a GPU, interpreted on the CPU
	$(BIN)/python -m pytest tests/engine/local/kernels

browser: $(VENV)/dev.stamp  ## The page in headless Chromium, which the system has to have
	$(BIN)/python tests/browser/run.py $(if $(DOOR),--door)

bench: $(VENV)/dev.stamp  ## Measure transcription on this machine; `antiphon bench NAME` for the rest
	$(BIN)/antiphon bench asr

compare: $(VENV)/dev.stamp  ## Quick benchmarks of two revisions in turn: make compare BASE=REV [ARGS="--only engine"]
	$(if $(BASE),,$(error make compare BASE=revision))
	$(BIN)/python -m bench.compare $(BASE) $(ARGS)

house: $(VENV)/dev.stamp  ## Measure the structure of the code: make house [ARGS="--rev REV"]
	$(BIN)/python -m bench.house $(ARGS)

peers:  ## Environments of the programs that benchmarks compare with
	bench/peers/setup.sh realtimestt
	bench/peers/setup.sh xllamacpp
	bench/peers/setup.sh piper
	bench/peers/setup.sh pocketsphinx

# The lock is what `make serve`, `make test` and the image install, each file by its sha256.
lock: build/uv.stamp  ## Write requirements.lock anew from pyproject.toml: make lock [UPGRADE=1] [TORCH_INDEX=URL]
	PATH="$(CURDIR)/build/uv/bin:$$PATH" build/uv/bin/python deploy/lock.py write \
	    $(if $(UPGRADE),--upgrade) $(if $(TORCH_INDEX),--torch-index $(TORCH_INDEX))

build/uv.stamp:
	$(PYTHON) -m venv build/uv
	build/uv/bin/python -m pip install -q uv==0.13.9
	touch $@

$(VENV)/pip.stamp:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/run.stamp: $(VENV)/pip.stamp requirements.lock pyproject.toml
	$(BIN)/python deploy/lock.py install all
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/dev.stamp: $(VENV)/pip.stamp requirements.lock pyproject.toml
	PIP_COMPILE=0 $(BIN)/python deploy/lock.py install dev
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@ $(VENV)/run.stamp

# Beside the environment, which has the newest.
build/oldest-transformers.stamp: tests/engine/oldest-transformers.txt | $(VENV)/pip.stamp
	rm -rf build/oldest-transformers
	$(BIN)/python -m pip install -q --no-compile --no-deps --target build/oldest-transformers -r $<
	touch $@

# The interpreter of Triton 3.6 does not run with numpy 2.4.
build/triton.stamp: | $(VENV)/pip.stamp
	rm -rf build/triton
	$(BIN)/python -m pip install -q --no-compile --no-deps --target build/triton triton==3.6.0 numpy==2.3.5
	touch $@

release: $(VENV)/dev.stamp  ## Build dist/VERSION and install it with each extra: make release [ARGS="--extras speech"]
	$(BIN)/python deploy/release.py $(ARGS)

sbom: $(VENV)/run.stamp  ## A bill of materials of what is installed, with licences: build/sbom.json (CycloneDX)
	$(BIN)/python deploy/lock.py compare $(VENV)
	$(PYTHON) -m venv build/sbom
	build/sbom/bin/python -m pip install -q cyclonedx-bom==7.5.0
	build/sbom/bin/cyclonedx-py environment $(VENV) --pyproject pyproject.toml --output-format JSON -o build/sbom.json
	@echo build/sbom.json

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build dist
