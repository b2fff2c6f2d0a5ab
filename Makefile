# `make demo` and `make test` work on a machine with nothing but Python (>= 3.11), pip and make.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python

.PHONY: chromium demo test lint bench docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed-demo  ## train a linear and some Grassmann heads on digits; a minute or two
	$(RUN) -m grassy demo

test: $(VENV)/installed-dev $(if $(CI),chromium)  ## all tests
	$(RUN) -m pytest

chromium:  ## the browser in which the report page is tested; elsewhere those tests are skipped
	command -v chromium chromedriver || (apt-get update -qq && apt-get install -y -qq chromium chromium-driver) \
		|| echo "could not install chromium: the tests in a browser will be skipped"

lint: $(VENV)/installed-dev  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(VENV)/installed-dev  ## the cost of a step on this machine's CPU
	$(RUN) -m benchmarks.step_cpu

docs: $(VENV)/installed-dev  ## the reference of the public names, from the docstrings, in site/
	$(VENV)/bin/pdoc -o site grassy grassy.geometry grassy.kernels grassy.heads grassy.optim grassy.surgery grassy.analysis grassy.transfer grassy.report

clean:
	rm -rf $(VENV) site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps make a second call install nothing; a change of the requirements makes the next call install again.
$(VENV)/installed-%: pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$*]"
	touch $@
