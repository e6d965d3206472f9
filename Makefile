# Two commands do everything on a machine with Python 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3.11
PY ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint pins.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal tests
PAGES := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile docs README.md  # a page runs in order

.PHONY: demo test suite pages test-long test-all check docs screens machines torches hosts package bench gpu paper soak clean

.venv/demo.stamp: pyproject.toml pins.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv || python3 -m venv .venv
	$(PIP) --editable '.[recipes]'
	touch $@

.venv/dev.stamp: .venv/demo.stamp
	$(PIP) --editable '.[dev]'
	touch $@

demo: .venv/demo.stamp  ## train on real digits at every level, print the table, write report.html
	$(BIN)/halfstep train demo --report report.html

check: .venv/dev.stamp  ## formatting, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

test: check  ## everything but the long and exhaustive runs
	$(MAKE) --no-print-directory suite pages

suite:
	$(PYTEST) -m 'not exhaustive and not long'

pages:
	$(PAGES)

test-long: .venv/dev.stamp  ## tests that start many processes for one fact; CI runs them too
	$(PYTEST) -m 'long and not exhaustive'

test-all: test test-long  ## the exhaustive runs: all bit patterns, every law broken once
	$(PYTEST) -m exhaustive
	OMP_NUM_THREADS=1 $(BIN)/python tests/laws/break_laws.py

docs: .venv/dev.stamp  ## the site, offline, warnings as errors; open build/site/index.html
	$(BIN)/python docs/build.py build/site

screens: .venv/dev.stamp  ## pictures of commands, reports and site to look at, in build/screens; needs chromium
	$(BIN)/python docs/take_screens.py build/screens

machines: .venv/dev.stamp  ## both commands under every instruction set that this processor can show
	$(BIN)/python .ci/machines.py

torches: .venv/dev.stamp  ## tests and README under the oldest, the pinned and the newest torch; before a release
	$(BIN)/python .ci/torches.py

hosts:  ## training loops that others own, pinned, in an environment of their own; before a release
	$(PY) .ci/hosts.py $(CASES)

package: .venv/dev.stamp  ## build the source archive and the wheel, install it elsewhere and try it
	$(BIN)/python .ci/package.py

bench: .venv/dev.stamp  ## side by side with peers; writes benchmarks/results/<machine>/*.json
	$(BIN)/python benchmarks/run_all.py

paper: .venv/demo.stamp  ## re-create the 2018 paper's phenomena; writes paper.html
	OMP_NUM_THREADS=1 $(BIN)/python -m papers.mixed_precision_training_2018.run --out paper.html

gpu:  ## GPU tests and benchmarks in ten minutes, nothing installed; OUT=folder MINUTES=9.5 PARTS="facts smoke"; benchmarks/gpu.py says more
	@PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) OMP_NUM_THREADS=1 $(PY) benchmarks/gpu.py $(if $(OUT),--out $(OUT)) $(if $(MINUTES),--minutes $(MINUTES)) $(PARTS)

soak: .venv/dev.stamp  ## random infs, saves, kills, resumes on 1, 2 and 4 ranks, bit-identical at the end; MINUTES=5
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.soak --minutes $(or $(MINUTES),5)

clean:
	rm -rf .venv report.html runs
