# make demo | check | test | test-slow | test-surroundings | docs | bench-peers
#   PYTHON=python3.12                     another Python
#   TORCH_ARGS="--index-url ADDRESS"      another build of torch: passed to the pip install of torch alone
#   PIP_ARGS="..."                        passed to every pip install
PYTHON     ?= python3
PIP_ARGS   ?=
TORCH_ARGS ?=
VENV       := .venv
BIN        := $(VENV)/bin
# A process of several that a segmentation fault ended is run once more: gloo now and then has one (docs/scaling.md).
RERUN      := --reruns 1 --only-rerun 'exit codes .*-11'
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export NO_MKDOCS_2_WARNING := 1
# Compiled files are kept, whatever the surroundings say: the tests start hundreds of processes that import the package.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check static fast test test-slow test-surroundings test-compat docs bench-peers format clean

# Every version is pinned, so pip resolves nothing but what the build of torch asks for (requirements/pins.py).
INSTALL    := bin/python -m pip --disable-pip-version-check install $(PIP_ARGS)
PINNED     := $(INSTALL) -q --no-deps

# An environment of another Python than the one that is named is made anew.
ifneq ($(origin PYTHON),file)
ANOTHER    := $(shell $(PYTHON) requirements/python.py --is-another $(VENV) && echo another_python)
endif
.PHONY: another_python
another_python:

# What a user has.
$(VENV)/.demo: requirements/demo.txt requirements/torch.txt pyproject.toml $(ANOTHER)
	@$(PYTHON) requirements/python.py $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/$(PINNED) -r requirements/demo.txt
	@echo "Next is torch: 2.7 GB to download for the build with CUDA. README.md says how to take the small one."
	$(VENV)/$(INSTALL) $(TORCH_ARGS) -c requirements/torch.txt -c requirements/demo.txt torch
	$(VENV)/$(PINNED) --no-build-isolation -e .
	touch $@

# What the tests need beside it. DeepSpeed is built here, in seconds: none of its kernels is.
$(VENV)/.ready: export DS_BUILD_OPS := 0
$(VENV)/.ready: requirements/dev.txt $(VENV)/.demo
	$(VENV)/$(PINNED) -r requirements/dev.txt
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

# The fast tests as an ordinary user, in the background, in a path with spaces, in the C locale, ...: see the script.
test-surroundings: $(VENV)/.ready
	bash tests/surroundings.sh $(RERUN) -m "not slow and not medium" -n 2 -q

# The site, into site/; a link that leads nowhere is an error.
docs: $(VENV)/.ready
	$(BIN)/mkdocs build --strict

# The oldest supported transformers, in an environment of its own. It begins clean: the wheel trains with nothing beside
# it but what it requires, before what the tests need is added. What they import is compiled when it is first imported;
# compiling all that is installed takes as long as unpacking it.
COMPAT_ENV := .venv-tf517
$(COMPAT_ENV)/.ready: requirements/tf517.txt requirements/torch.txt pyproject.toml
	@$(PYTHON) requirements/python.py $(COMPAT_ENV)
	$(PYTHON) -m venv $(COMPAT_ENV)
	$(COMPAT_ENV)/$(INSTALL) -q --no-compile $(TORCH_ARGS) -c requirements/torch.txt -c requirements/tf517.txt torch
	rm -f dist/*.whl
	$(COMPAT_ENV)/bin/python -m pip wheel $(PIP_ARGS) -q --no-deps -w dist .
	$(COMPAT_ENV)/$(INSTALL) -q --no-compile -c requirements/tf517.txt dist/*.whl
	cd dist && ../$(COMPAT_ENV)/bin/gruppo demo --steps 2 --output-dir demo
	$(COMPAT_ENV)/$(PINNED) --no-compile -r requirements/tf517.txt
	$(COMPAT_ENV)/$(PINNED) --no-compile --no-build-isolation -e .
	touch $@

# What does not touch transformers need not run twice, nor every case of what does.
COMPAT := config data demo engine policy trainer rollout/test_hf.py rollout/test_continuous.py rewards/test_models.py \
	cli/test_train.py test_public_api.py
ALIKE := $(addprefix engine/test_,kernels.py sampling.py turns.py) \
	$(addprefix trainer/test_,async.py audits.py requests.py reward_failures.py vllm.py)
test-compat: $(COMPAT_ENV)/.ready
	$(COMPAT_ENV)/bin/pytest $(RERUN) -m "not slow and not medium" --thin 10 -n 2 -q $(COMPAT:%=tests/%) \
		$(ALIKE:%=--ignore=tests/%)

# What we measure ourselves against lives in its own environment and is never a dependency.
PEERS_ENV  := .venv-peers
$(PEERS_ENV)/.ready: requirements/demo.txt requirements/torch.txt pyproject.toml
	@$(PYTHON) requirements/python.py $(PEERS_ENV)
	$(PYTHON) -m venv $(PEERS_ENV)
	$(PEERS_ENV)/$(INSTALL) -q $(TORCH_ARGS) -c requirements/torch.txt -c requirements/demo.txt torch
	$(PEERS_ENV)/$(INSTALL) -q -c requirements/demo.txt trl==1.16.0 -e .
	touch $@

bench-peers: $(PEERS_ENV)/.ready

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(COMPAT_ENV) $(PEERS_ENV) build dist site *.egg-info
