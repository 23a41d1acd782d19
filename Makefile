# make train [ARGS='--num_towers=4 …']   learn the digits on two towers, or what ARGS say
# make bench [ARGS='--quick …']          measure towers beside what else there is; --help says more
# make test  [ARGS='-k pipeline …']      run the tests
# make clean                             remove the environments and what Python leaves behind
#
# PYTHON=python3.11                          the Python to make the environment from
# VENV=.venv-old PINS='tensorflow==2.15.1'   another environment, with these versions in it

PYTHON ?= python3
VENV ?= .venv
PINS ?=
INSTALLED := $(VENV)/installed

.PHONY: train bench test clean

train: $(INSTALLED)
	$(VENV)/bin/python train.py $(ARGS)

bench: $(INSTALLED)
	$(VENV)/bin/python -m benchmarks.bench $(ARGS)

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest tests $(ARGS)

clean:
	rm -rf .venv .venv-* build dist .pytest_cache towers.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# setup.py says what is needed, so a change of it installs anew. pip first: one that is older than
# it has to be may not find the right TensorFlow.
$(INSTALLED): setup.py
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --editable '.[test]' $(PINS)
	touch $(INSTALLED)
