# make train [ARGS='--num_towers=4 …']   learn the digits on two towers, or what ARGS say
# make bench [ARGS='--quick …']          measure towers beside what else there is; --help says more
# make examples                          run the programs of examples/, with the packages they need
# make test  [ARGS='-k pipeline …']      run the tests but the slow ones, on all cores
# make test-all                          run all of them; test-slow: what `make test` leaves out
# make lint                              ruff and mypy, with the settings of pyproject.toml
# make scaling [ARGS='--model=digits …']  the batch and learning-rate claim, arm by arm, resumable
# make scaling-speed [ARGS='--quick']      images/s on 1, 2, 4, 8 towers, and where a step's time goes
# make scaling-step                        what `sum` and `mean` do to a step, by optimizer
# make docs                              render docs/ to build/docs/index.html
# make clean                             remove the environments and what Python leaves behind
#
# PYTHON=python3.11                          the Python to make the environment from
# VENV=.venv-old PINS='tensorflow==2.15.1'   another environment, with these versions in it

PYTHON ?= python3
VENV ?= .venv
PINS ?=
INSTALLED := $(VENV)/installed
PLOTS := $(VENV)/plots
DOCS := $(VENV)/docs
LINT := $(VENV)/lint
EXAMPLES := $(VENV)/examples
# Its warnings are of setuptools to those who make packages: what an editable installation is.
PIP := PYTHONWARNINGS=ignore $(VENV)/bin/python -m pip install --quiet

# A process a core.
PYTEST := $(VENV)/bin/python -m pytest tests --numprocesses=logical

.PHONY: train bench examples test test-all test-slow lint scaling scaling-speed \
        scaling-step docs clean

train: $(INSTALLED)
	$(VENV)/bin/python train.py $(ARGS)

bench: $(PLOTS)
	$(VENV)/bin/python -m benchmarks.bench $(ARGS)

# The one of an Estimator says so where this TensorFlow has none.
examples: $(EXAMPLES)
	$(VENV)/bin/python -m examples.finished_class
	$(VENV)/bin/python -m examples.tower_loop
	$(VENV)/bin/python -m examples.slim_feed_dict
	$(VENV)/bin/python -m examples.gan --steps=2000 --picture=
	$(VENV)/bin/python -m examples.language_model --epochs=2
	$(VENV)/bin/python -m examples.keras_fit
	$(VENV)/bin/python train.py --model=examples.own_data:classify \
	    --dataset=examples.own_data:spirals --train_steps=400 --base_learning_rate=0.01
	-$(VENV)/bin/python -m examples.estimator

test: $(INSTALLED)
	$(PYTEST) -m 'not slow' $(ARGS)

test-all: $(INSTALLED)
	$(PYTEST) $(ARGS)

test-slow: $(INSTALLED)
	$(PYTEST) -m slow $(ARGS)

lint: $(LINT)
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m mypy

scaling: $(PLOTS)
	$(VENV)/bin/python -m benchmarks.batch_scaling $(ARGS)

scaling-speed: $(PLOTS)
	$(VENV)/bin/python -m benchmarks.tower_speed $(ARGS)

scaling-step: $(PLOTS)
	$(VENV)/bin/python -m benchmarks.effective_step $(ARGS)

# Docstrings are read, not imported, so no TensorFlow starts. The theme's makers advertise.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet --config-file .mkdocs.yml $(ARGS)
	@echo build/docs/index.html

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .ruff_cache .mypy_cache towers_tf1.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# setup.py says what is needed, so a change of it installs anew. pip first: one that is older than
# it has to be may not find the right TensorFlow.
$(INSTALLED): setup.py
	@echo "Installing TensorFlow (600 MB), tf-slim, numpy, absl, tqdm and pytest into $(VENV), with"
	@echo "$(shell $(PYTHON) --version 2>&1). This is done once and takes one to three minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@$(PIP) --editable '.[test]' $(PINS)
	@touch $(INSTALLED)
	@echo "Installed. TensorFlow takes some seconds to start, the first time up to a minute."

$(PLOTS): $(INSTALLED)
	@echo "Installing matplotlib into $(VENV): once, some seconds."
	@$(PIP) --editable '.[plots]'
	@touch $(PLOTS)

# tf-keras of the TensorFlow that is there, from 2.16 on.
$(EXAMPLES): $(INSTALLED)
	@echo "Installing what the examples need into $(VENV): once, some seconds."
	@version=$$($(VENV)/bin/python -m pip show tensorflow | sed -n 's/^Version: \([0-9]*\.[0-9]*\).*/\1/p'); \
	case $$version in \
	    2.1[6-9] | 2.2*) $(PIP) --editable ".[tf-layers-$$version]" ;; \
	esac
	@touch $(EXAMPLES)

$(DOCS): $(INSTALLED)
	@echo "Installing MkDocs into $(VENV): once, some seconds."
	@$(PIP) --editable '.[docs]'
	@touch $(DOCS)

$(LINT): $(INSTALLED)
	@echo "Installing ruff and mypy into $(VENV): once, some seconds."
	@$(PIP) --editable '.[lint]'
	@touch $(LINT)
