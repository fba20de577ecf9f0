# `make` lists the targets.

VENV ?= .venv
PYTHON ?= $(shell for python in python3.11 python3; do $$python -c "" 2>/dev/null && echo $$python && break; done)
BIN := $(VENV)/bin
OLDEST ?= .venv-oldest
STAMP := $(VENV)/.installed
# An interpreter that has PyTorch, for `make bench`: `pip install -e ".[torch]"` gives it to this one.
TORCH_PYTHON ?= $(BIN)/python
# For `make bench`: what is compared with tf.distribute, besides schedules; and what processors without bfloat16 still do in a minute.
DISTRIBUTED := --ways=data_parallel,compressed,mirrored --parallel=1
BFLOAT16 := --dtypes=bfloat16 --samples=1 --micro_batches=4

# Tests that compare seconds where the machine has nothing else to do: `make accuracy`.
TIMED := $(patsubst %,tests/test_%.py,emulator worked_examples build_op_graph fd_dps profile_text split_graph)

export TF_CPP_MIN_LOG_LEVEL ?= 2
# Each process of a test run would compile all modules and rewrite all tests anew: ten seconds. `make clean` removes it.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv train docs pictures results results-dapple results-ooo results-operators accuracy bench zoo faults test test-all test-share test-oldest test-fast lint bless clean

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
	$(BIN)/python -m pytest tests/test_timeline_page.py tests/test_graph_page.py tests/test_what_if.py --screenshots=docs/pictures

results: results-dapple results-ooo results-operators ## compute the papers' evaluations again; fails when they aren't what docs/results has

results-dapple: $(STAMP) ## the part on DAPPLE
	$(BIN)/python -m tools.evaluation.reproduce_dapple

results-ooo: $(STAMP) ## the part on Out-Of-Order BackProp
	$(BIN)/python -m tools.evaluation.reproduce_ooo

results-operators: $(STAMP) ## the part on FD-DPS
	$(BIN)/python -m tools.evaluation.reproduce_fd_dps

accuracy: $(STAMP) ## compare the simulator with TensorFlow's executor and with real training, and ways of profiling, some 20 minutes
	$(BIN)/python -m tools.evaluation.check_simulator
	$(BIN)/python -m pytest --timed $(TIMED)
	$(BIN)/python -m tools.evaluation.check_prediction
	$(BIN)/python -m tools.evaluation.check_profiles

bench: $(STAMP) ## run all benchmarks, two hours on a quiet machine; rewrites docs/results/speed.json and scale.json
	$(BIN)/python -m tools.evaluation.bench_cluster --json=docs/results/speed.json
	$(BIN)/python -m tools.evaluation.bench_cluster $(DISTRIBUTED) --jit_compile --json=docs/results/speed.json
	$(BIN)/python -m tools.evaluation.bench_cluster $(DISTRIBUTED) --model=resnet --json=docs/results/speed.json
	$(BIN)/python -m tools.evaluation.bench_cluster $(DISTRIBUTED) --model=resnet --jit_compile --json=docs/results/speed.json
	$(BIN)/python -m tools.evaluation.bench_overhead --json=docs/results/speed.json
	$(BIN)/python -m tools.evaluation.bench_client --steps=10 --rounds=4 --json=docs/results/speed.json
	$(BIN)/python -m tools.evaluation.bench_torch --torch_python=$(TORCH_PYTHON) --samples=1,2,4,8 --json=docs/results/speed.json
	$(BIN)/python -m tools.evaluation.bench_torch --torch_python=$(TORCH_PYTHON) $(BFLOAT16) --json=docs/results/speed.json
	$(BIN)/python -m tools.evaluation.bench_monitoring
	$(BIN)/python -m tools.evaluation.bench_data
	$(BIN)/python -m tools.evaluation.bench_memory --json=docs/results/scale.json
	$(BIN)/python -m tools.evaluation.bench_preparation --json=docs/results/scale.json
	$(BIN)/python -m tools.evaluation.bench_planner --json=docs/results/scale.json
	$(BIN)/python -m tools.evaluation.bench_many_devices --json=docs/results/scale.json
	$(BIN)/python -m tools.evaluation.bench_recompute --json=docs/results/scale.json
	$(BIN)/python -m tools.evaluation.bench_recompute --models=gpt --jit_compile=false --schedule=gpipe --micro_batches=8 --ways=none,boundary,offload --json=docs/results/scale.json
	$(BIN)/python -m tools.evaluation.bench_first_step --json=docs/results/scale.json

zoo: $(STAMP)-zoo ## train keras.applications, other libraries' and random models beside plain Keras, hours; rewrites docs/zoo.md
	$(BIN)/python -m tools.evaluation.zoo --json=docs/results/zoo.json --document=docs/zoo.md

faults: $(STAMP) ## kill, stop and cut off workers, and lose packets one way, while a model trains, three hours; needs root
	$(BIN)/python -m tools.evaluation.check_faults
	$(BIN)/python -m tools.evaluation.soak --json=docs/results/soak.json

test: lint ## check style and types, and run the tests but for most of many like cases, in five minutes, or three times as long on a slow machine
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not thorough"

# In a second run, with fresh processes: what a thousand sessions have left in memory isn't there any more.
test-all: test ## run every check: lint, types and all tests, in half an hour, or three times as long on a slow machine
	$(BIN)/python -m pytest -n auto --dist worksteal -m thorough

SHARE ?= 1/3
test-share: test ## make test, and a share of what test-all runs besides: SHARE=2/3 is the second of three
	$(BIN)/python -m pytest -n auto --dist worksteal -m thorough --share=$(SHARE)

test-oldest: ## run the tests of what isn't public with the oldest TensorFlow and Keras that setup.py allows, two minutes
	@test -n "$(PYTHON)" || { echo "found no python3.11 or python3; set PYTHON=" >&2; exit 1; }
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q --disable-pip-version-check -c constraints-oldest.txt -e . pytest pytest-timeout
	$(OLDEST)/bin/python -m pytest tests/test_private_parts.py tests/test_tensorflow_library.py

test-fast: $(STAMP) ## run all but the slower tests, in under three minutes
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not thorough"

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
