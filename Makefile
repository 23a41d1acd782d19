# make train [ARGS='--num_towers=4 …']   learn the digits on two towers, or what ARGS say
# make bench [ARGS='--quick …']          measure towers beside what else there is; --help says more
# make test  [ARGS='-k pipeline …']      run the tests
# make scaling [ARGS='--model=digits …']  the batch and learning-rate claim, arm by arm, resumable
# make scaling-speed [ARGS='--quick']      images/s on 1, 2, 4, 8 towers, and where a step's time goes
# make scaling-step                        what `sum` and `mean` do to a step, by optimizer
# make clean                             remove the environments and what Python leaves behind
#
# PYTHON=python3.11                          the Python to make the environment from
# VENV=.venv-old PINS='tensorflow==2.15.1'   another environment, with these versions in it

PYTHON ?= python3
VENV ?= .venv
PINS ?=
INSTALLED := $(VENV)/installed
PLOTS := $(VENV)/plots

.PHONY: train bench test scaling scaling-speed scaling-step clean

train: $(INSTALLED)
	$(VENV)/bin/python train.py $(ARGS)

bench: $(PLOTS)
	$(VENV)/bin/python -m benchmarks.bench $(ARGS)

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest tests $(ARGS)

scaling: $(PLOTS)
	$(VENV)/bin/python -m benchmarks.batch_scaling $(ARGS)

scaling-speed: $(PLOTS)
	$(VENV)/bin/python -m benchmarks.tower_speed $(ARGS)

scaling-step: $(PLOTS)
	$(VENV)/bin/python -m benchmarks.effective_step $(ARGS)

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

$(PLOTS): $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --editable '.[plots]'
	touch $(PLOTS)
