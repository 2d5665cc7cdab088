# make demo    set everything up in .venv and compare six methods on the embedded digits data
# make test    set everything up and run checks and tests
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check types lint format fuzz slow cluster-test deploy-test ui-test bench docs dist clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not ui"

check: lint types

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What takes minutes: at least twenty kills and resumes, long property tests.
slow: $(READY)
	$(BIN)/python -m pytest -m slow --ignore tests/deploy --ignore tests/cluster

# A Ray cluster of three nodes on this machine: the same bits, with actors, nodes and workers killed.
cluster-test: $(READY)
	$(BIN)/python -m pytest -n 0 -m slow tests/cluster --durations 10

# A SuperLink and three SuperNodes with TLS, five methods on three engines, faults; stops all of it again.
deploy-test: $(READY)
	$(BIN)/python -m pytest -n 0 -m slow tests/deploy --durations 20

# The report and the live page in a real browser (Debian's chromium and chromium-driver).
ui-test: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[ui]"
	$(BIN)/python -m tests.ui.browser
	$(BIN)/python -m pytest -n 0 -m ui tests/ui

# A million structured mutants per codec.
fuzz: $(READY)
	$(BIN)/python -m tests.codecs.fuzz 1000000

# Ratios measured in one run; nothing else should be running.
bench: $(READY)
	$(BIN)/python -m benchmarks.rounds; rounds=$$?; $(BIN)/python -m benchmarks.sparse; sparse=$$?; \
		$(BIN)/python -m benchmarks.compare; compare=$$?; \
		$(BIN)/python -m benchmarks.codecs && exit $$((rounds + sparse + compare))

# The documentation as a site that opens offline: build/site/index.html. A warning is an error.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo build/site/index.html

# A wheel, tried out in an empty environment far from here.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build
	sh tests/dist.sh dist/laconic-*.whl $(abspath constraints.txt)

clean:
	rm -rf $(VENV) dist build runs .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade-strategy only-if-needed \
		-c constraints.txt -e ".[dev]"
	touch $(READY)
