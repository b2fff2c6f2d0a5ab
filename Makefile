# Every target works on a machine with nothing but Python (>= 3.11), pip and make.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
PARALLEL ?= -n 2 --dist worksteal
# Let glibc keep the memory that it freed: a sixth of the time of the tests went into page faults.
export MALLOC_MMAP_THRESHOLD_ = 1073741824
export MALLOC_TRIM_THRESHOLD_ = 1073741824

.PHONY: bench check chromium clean demo docs lint package test
.DELETE_ON_ERROR:

demo: $(VENV)/installed-demo  ## what subspaces do to features, on digits: about a minute, and a page to look at
	$(RUN) -m grassy demo

check: lint  ## lint, types and the fast tests: under two minutes
	$(RUN) -m pytest $(PARALLEL) -m "not slow"

test: $(VENV)/installed-dev $(if $(CI),chromium)  ## all tests: under twelve minutes
	$(RUN) -m pytest $(PARALLEL)

chromium:  ## the browser in which the report page is tested; elsewhere those tests are skipped
	command -v chromium chromedriver || (apt-get update -qq && apt-get install -y -qq chromium chromium-driver) \
		|| echo "could not install chromium: the tests in a browser will be skipped"

lint: $(VENV)/installed-dev  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# The wheel is built from the sdist, so both are tested, and installed where only the other packages of $(VENV) are seen.
package: $(VENV)/installed-dev  ## build sdist and wheel, check them, install the wheel into a clean environment, use it there
	rm -rf dist build
	$(RUN) -m hatchling build -t sdist -d dist
	mkdir build && tar xzf dist/*.tar.gz -C build --strip-components 1
	cd build && $(abspath $(RUN)) -m hatchling build -t wheel -d ../dist
	$(RUN) -m twine check --strict dist/*
	$(RUN) -m venv build/clean
	build/clean/bin/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps dist/*.whl
	$(RUN) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > dependencies.pth
	mv dependencies.pth $$(build/clean/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
	build/clean/bin/python -I .ci/smoke.py
	cd build && $(abspath $(VENV))/bin/mypy --strict --config-file= --cache-dir mypy --follow-imports silent \
		--python-executable clean/bin/python ../.ci/typed.py

bench: $(VENV)/installed-dev  ## the cost of a step on this machine's CPU
	$(RUN) -m benchmarks.step_cpu

docs: $(VENV)/installed-dev  ## the documentation in site/, which opens from disk; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) site dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The stamps make a second call install nothing; a change of the requirements makes the next call install again.
$(VENV)/installed-%: pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$*]"
	touch $@
