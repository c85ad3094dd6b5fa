# make pretrain   a small NVFP4 run from nothing: environment, data, training
# make parity     layouts x recipes against one process, into docs/distributed.md
# make docs       the site of docs/, into site/; a dead link is an error
# make test       the test suite; make test-all   with what takes longest, and with new examples of
#                 the tests by Hypothesis, which marks its tests itself
PYTHON ?= python3
BIN := .venv/bin
RUN := runs/nvfp4
# In the order of their folders, which ends with short files; by default the longest come last. The
# third process computes while another waits for ranks that it has started.
PYTEST := $(BIN)/pytest -q -n 3 --dist loadfile --no-loadscope-reorder
# The standard library's own source: text that every machine with Python has.
STDLIB := $(shell $(PYTHON) -c "import sysconfig; print(sysconfig.get_path('stdlib'))")
SOURCES := --input $(STDLIB) --pattern '*.py' --exclude site-packages dist-packages test tests

# Without it each process of the tests compiles the package's source again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: pretrain parity docs test test-all
pretrain: .venv/installed data/stdlib.idx
	$(BIN)/python pretrain_gpt.py @examples/gpt-7m-cpu.args --fp4-recipe nvfp4 \
	    --data-path data/stdlib --tokenizer-model data/tokenizer \
	    --save $(RUN) --tensorboard-dir $(RUN)/tensorboard --short-log

parity: .venv/installed data/stdlib.idx
	$(BIN)/python -m benchmarks parity --data-path data/stdlib --tokenizer-model data/tokenizer \
	    --output benchmarks/results/parity.json
	$(BIN)/python docs/generate/parallelism.py

docs: .venv/docs-installed
	$(BIN)/mkdocs build --strict

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST)

test-all: test
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile explore

data/stdlib.idx: .venv/installed
	$(BIN)/lowbit-tokenizer $(SOURCES) --vocab-size 4096 --output data/tokenizer
	$(BIN)/lowbit-preprocess $(SOURCES) --tokenizer-model data/tokenizer \
	    --output-prefix data/stdlib --workers 2

# torch comes first and alone, and +cpu: PyPI's has CUDA, which pip would take where the CPU index
# is not reached.
# Megatron-LM's wheels need Python 3.12; on 3.11 its source distribution is built, in some 20 s.
.venv/installed: constraints.txt pyproject.toml
	$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) \
	    else f'Python 3.11, 3.12 or 3.13 is needed, not {v[0]}.{v[1]}: make PYTHON=python3.12')"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --no-deps "$$(grep '^torch==' constraints.txt)+cpu" \
	    --extra-index-url https://download.pytorch.org/whl/cpu
	if $(BIN)/python -c "import sys; sys.exit(sys.version_info >= (3, 12))"; then \
	    $(BIN)/pip install --no-deps --ignore-requires-python --no-binary megatron-core \
	        --constraint constraints.txt megatron-core; fi
	$(BIN)/pip install --constraint constraints.txt --editable '.[test]'
	touch $@

.venv/docs-installed: .venv/installed
	$(BIN)/pip install --constraint constraints.txt --editable '.[docs]'
	touch $@
