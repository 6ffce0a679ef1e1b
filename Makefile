# make demo | check | test | test-slow | docs | bench-peers      PIP_ARGS="..." is passed to every pip install
PYTHON   ?= python3
PIP_ARGS ?=
VENV     := .venv
BIN      := $(VENV)/bin
# A process of several that a segmentation fault ended is run once more: gloo now and then has one (docs/scaling.md).
RERUN    := --reruns 1 --only-rerun 'exit codes .*-11'
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export NO_MKDOCS_2_WARNING := 1
# Compiled files are kept, whatever the surroundings say: the tests start hundreds of processes that import the package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check static fast test test-slow test-compat docs bench-peers format clean

# What a user has.
$(VENV)/.demo: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_ARGS) -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install $(PIP_ARGS) -q -c constraints.txt -e '.[demo]'
	touch $@

# What the tests need beside it. DeepSpeed is built here, in seconds: none of its kernels is.
$(VENV)/.ready: export DS_BUILD_OPS := 0
$(VENV)/.ready: $(VENV)/.demo
	$(BIN)/pip install $(PIP_ARGS) -q -c constraints.txt -e '.[dev,deepspeed]'
	touch $@

demo: $(VENV)/.demo
	$(BIN)/gruppo demo

static: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

fast: $(VENV)/.ready
	$(BIN)/pytest $(RERUN) -m "not slow and not medium" -n 2 -q

check: static fast

test: $(VENV)/.ready
	$(BIN)/pytest $(RERUN) -m "not slow" -n 2

test-slow: $(VENV)/.ready
	$(BIN)/pytest $(RERUN) -m slow -n 2 --summary=benchmarks/results/test_slow.json

# The site, into site/; a link that leads nowhere is an error.
docs: $(VENV)/.ready
	$(BIN)/mkdocs build --strict

# The oldest supported transformers, in an environment of its own. It begins clean: the wheel trains with nothing beside
# it but what it requires, before what the tests need is added. What they import is compiled when it is first imported;
# compiling all that is installed takes as long as unpacking it.
INTO_517 := .venv-tf517/bin/pip install $(PIP_ARGS) -q --no-compile -c constraints-tf517.txt
.venv-tf517/.ready: constraints-tf517.txt pyproject.toml
	$(PYTHON) -m venv .venv-tf517
	$(INTO_517) torch==2.13.0
	rm -f dist/*.whl
	.venv-tf517/bin/pip wheel $(PIP_ARGS) -q --no-deps -w dist .
	$(INTO_517) dist/*.whl
	cd dist && ../.venv-tf517/bin/gruppo demo --steps 2 --output-dir demo
	$(INTO_517) -e '.[dev]'
	touch $@

# What does not touch transformers need not run twice, nor every case of what does.
COMPAT := config data demo engine policy trainer rollout/test_hf.py rollout/test_continuous.py rewards/test_models.py \
	cli/test_train.py test_public_api.py
ALIKE := $(addprefix engine/test_,kernels.py sampling.py turns.py) \
	$(addprefix trainer/test_,async.py audits.py requests.py reward_failures.py vllm.py)
test-compat: .venv-tf517/.ready
	.venv-tf517/bin/pytest $(RERUN) -m "not slow and not medium" --thin 10 -n 2 -q $(COMPAT:%=tests/%) \
		$(ALIKE:%=--ignore=tests/%)

# What we measure ourselves against lives in its own environment and is never a dependency.
.venv-peers/.ready:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install $(PIP_ARGS) -q -c constraints.txt torch==2.13.0
	.venv-peers/bin/pip install $(PIP_ARGS) -q -c constraints.txt trl==1.16.0 -e .
	touch $@

bench-peers: .venv-peers/.ready

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-tf517 .venv-peers build dist site *.egg-info
