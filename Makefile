# Two doors for newcomers, `make demo` and `make test`; `make quick` and `make check` for those who change the code.
# On two cores: the first call installs (about 3 minutes), the demo takes 45 seconds, the tests 3 to 4 minutes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIGHT := $(VENV)/light
READY := $(VENV)/ready
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test quick check format slow chaos friends dist docs pictures numbers lock speeds report clean

demo: $(LIGHT)
	$(BIN)/holdfast demo
	@echo "next: source $(BIN)/activate, and then for instance: holdfast run rot-mnist linf --buffer-size 200"

# One process per core, up to four: each needs two gigabytes. Work is stolen, as the tests of a file share fixtures and
# differ a thousandfold in what they take. `make test COVERAGE=1` also counts which lines of the package they reach,
# which takes about a third longer, and fails below 90 %.
SPREAD := -n logical --maxprocesses 4 --dist worksteal
test: $(READY)
	$(BIN)/pytest $(SPREAD) -q $(if $(COVERAGE),--cov --cov-report=term:skip-covered)

# About a minute: the losses, the buffer, the main learners, and whether README and layers are as they say.
QUICK := config evaluation layers matrix metrics readme registry regularizers surface
quick: $(READY)
	$(BIN)/pytest -q $(QUICK:%=tests/test_%.py) tests/models/test_networks.py \
		tests/buffer/test_reservoir.py tests/buffer/test_memory.py \
		tests/learners/test_consistency.py tests/learners/test_er.py tests/learners/test_clser.py

slow: $(READY)
	$(BIN)/pytest -q -m slow

# Weights & Biases, MLflow, Lightning and transformers are large: their tests are skipped where they are not installed.
friends: $(READY)
	$(INSTALL) -e '.[friends]'
	$(BIN)/pytest -q -m 'not slow' tests/test_loggers.py tests/integrations tests/docs/test_walk.py

# Kills, full disks, lost folders and damaged files at random; each round must end as an undisturbed one. Counts go to
# docs/chaos.json. `make chaos MINUTES=10 CHAOS='--seed 3 --only run folder'`
MINUTES ?= 60
chaos: $(READY)
	cd tests && ../$(BIN)/python -m chaos --minutes $(MINUTES) --out ../docs/chaos.json $(CHAOS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -q --no-header tests/test_layers.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What the package itself needs. torch comes first and pinned: resolving it together with the rest may choose a build of
# several gigabytes.
$(LIGHT): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Holdfast needs Python 3.11 or newer.')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e '.[download]'
	touch $(LIGHT)

# What tests, checks and the site need on top.
$(READY): $(LIGHT)
	$(INSTALL) -e '.[download,dev,docs]'
	touch $(READY)

# A wheel, in dist/; `make slow` installs one in a fresh environment and runs the demo from it.
dist: $(LIGHT)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

# The site, in site/; strict: a broken link or a name that is not there is an error. Then all that the pages tell a
# reader to type is typed, and the examples are run.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/pytest $(SPREAD) -q -m pages tests/docs

pictures: $(READY)
	$(BIN)/python docs/make_pictures.py

# The numbers and tables of README and pages, from result files, measurements and the program.
numbers: $(READY)
	$(BIN)/python docs/make_numbers.py

# The hashes of everything in constraints.txt.
lock:
	test -x build/lock/bin/python || $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check pip-tools
	build/lock/bin/python scripts/lock.py

# The speeds from which the time of a run is guessed, from what `holdfast bench` printed.
speeds: $(READY)
	$(BIN)/python scripts/speeds.py

report: $(READY)
	$(BIN)/holdfast report results --out docs/report.html

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .coverage
