# `make` lists the targets.

VENV ?= .venv
PYTHON ?= $(shell for python in python3.11 python3; do $$python -c "" 2>/dev/null && echo $$python && break; done)
BIN := $(VENV)/bin
OLDEST ?= .venv-oldest
STAMP := $(VENV)/.installed
# An interpreter that has PyTorch, for `make bench`: `pip install -e ".[torch]"` gives it to this one.
TORCH_PYTHON ?= $(BIN)/python
BENCH := $(BIN)/python -m tools.evaluation.bench

export TF_CPP_MIN_LOG_LEVEL ?= 2
# Each process of a test run would compile all modules and rewrite all tests anew: ten seconds. `make clean` removes it.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv train docs pictures examples results results-dapple results-ooo results-operators accuracy bench zoo faults test test-oldest lint bless clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

venv: $(STAMP) ## create .venv with the tested version of everything

$(STAMP): setup.py pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "found no python3.11 or python3; set PYTHON=" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

train: $(STAMP) ## train a byte-level GPT on four local devices, a few minutes; leaves everything in runs/gpt
	$(BIN)/python -m tools.train_gpt

$(STAMP)-%: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[$*]"
	@touch $@

docs: $(STAMP)-docs ## build the site of the documentation in build/site and check its links, seconds
	$(BIN)/python docs/site/pages.py build/docs
	$(BIN)/zensical build --clean --strict

pictures: $(STAMP) ## run the documents' examples, and draw their pictures and screenshots anew; needs chromium
	$(BIN)/python -m tools.evaluation.run_document --write docs/concepts.md docs/tutorial.md docs/timelines.md docs/dumps.md
	$(BIN)/python -m pytest tests/test_what_if.py --screenshots=docs/pictures

examples: $(STAMP) ## run the tutorial, and the examples that start processes of their own, some minutes
	$(BIN)/python -m tools.evaluation.run_document docs/tutorial.md
	$(BIN)/python docs/examples/resume_after_kill.py
	$(BIN)/python docs/examples/two_workers.py 16
	$(BIN)/python -m tools.launch --workers=2 -- $(BIN)/python docs/examples/lora_on_workers.py --epochs=1

results: results-dapple results-ooo results-operators ## compute the papers' evaluations again; fails when they aren't what docs/results has

results-dapple: $(STAMP) ## the part on DAPPLE
	$(BIN)/python -m tools.evaluation.reproduce_dapple

results-ooo: $(STAMP) ## the part on Out-Of-Order BackProp
	$(BIN)/python -m tools.evaluation.reproduce_ooo

results-operators: $(STAMP) ## the part on FD-DPS
	$(BIN)/python -m tools.evaluation.reproduce_fd_dps

accuracy: $(STAMP) ## compare the simulator with TensorFlow's executor and with real training, some 20 minutes
	$(BENCH) --cases=simulator,prediction
	$(BENCH) --cases=prediction --set=model=dense --set=batch=256
	$(BENCH) --cases=prediction --set=model=resnet

bench: $(STAMP) ## run all benchmarks, two hours on a quiet machine; adds to docs/results/speed.json and scale.json
	$(BENCH) --cases=overhead,client,cluster,monitoring --json=docs/results/speed.json
	$(BENCH) --cases=overhead,cluster --set=jit_compile=true --json=docs/results/speed.json
	$(BENCH) --cases=cluster --set=model=resnet --json=docs/results/speed.json
	$(BENCH) --cases=torch,torch_memory --set=python=$(TORCH_PYTHON) --json=docs/results/speed.json
	$(BENCH) --cases=planner,preparation,first_step,recompute,rewriting,memory --json=docs/results/scale.json

zoo: $(STAMP)-zoo ## train keras.applications, other libraries' and random models beside plain Keras, hours; rewrites docs/results/zoo.md
	$(BIN)/python -m tools.evaluation.zoo --json=docs/results/zoo.json --document=docs/results/zoo.md

faults: $(STAMP) ## kill, stop and cut off workers, and lose packets one way, while a model trains, four hours; needs root
	$(BIN)/python -m tools.evaluation.soak --json=docs/results/soak.json
	for plan in 1:3 3:1 straight zb_h1 data_parallel chunks; do \
		$(BIN)/python -m tools.evaluation.soak --plan=$$plan --minutes=15 || exit 1; done

test: lint ## check style and types, and run all tests: five minutes on two cores, or three times as long on a slow machine
	$(BIN)/python -m pytest -n auto --dist worksteal

test-oldest: ## run the tests of what isn't public with the oldest TensorFlow and Keras that setup.py allows, two minutes
	@test -n "$(PYTHON)" || { echo "found no python3.11 or python3; set PYTHON=" >&2; exit 1; }
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q --disable-pip-version-check -c constraints-oldest.txt -e . pytest pytest-timeout
	$(OLDEST)/bin/python -m pytest tests/test_private_parts.py tests/test_tensorflow_server.py

lint: $(STAMP) ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types && mkdir -p build/types/dapple_tf
	ln -s $(CURDIR)/graph_passes build/types/
	ln -s $(filter-out %/models %/tools,$(wildcard $(CURDIR)/dapple_tf/*)) $(CURDIR)/models $(CURDIR)/tools build/types/dapple_tf/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file=$(CURDIR)/pyproject.toml --cache-dir=$(CURDIR)/.mypy_cache

bless: $(STAMP) ## rewrite the golden files of the tests; read the difference before you commit it
	$(BIN)/python -m pytest tests --bless

clean: ## remove caches and build products; keeps the environment and runs/
	rm -rf build dist *.egg-info .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
