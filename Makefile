PYTHON ?= python3
BIN := .venv/bin
# Each worker takes neighbouring tests, so that fixtures that a file's tests share are built once.
TWO := -n 2 --dist worksteal
# Newer than pyproject.toml and constraints.txt once the environment holds what these ask for.
STAMP := .venv/.setup-stamp

.DEFAULT_GOAL := help
.PHONY: help setup demo laptop paper card bench test test-further test-slow test-gpu test-extras test-slurm test-lowest campaigns lint types format smoke docs site wheel clean

# One thread a process: two pytest workers with spinning thread pools slow each other down many times over.
test test-further test-slow test-extras test-slurm campaigns smoke wheel: export OMP_NUM_THREADS = 1
test test-further test-slow test-extras test-slurm campaigns smoke wheel: export MKL_NUM_THREADS = 1
test test-further test-slow test-extras test-slurm campaigns smoke wheel: export OMP_WAIT_POLICY = PASSIVE
# The tests start hundreds of commands. Each would compile the package again if the environment set this.
test test-further test-slow test-extras test-slurm campaigns smoke wheel: export PYTHONDONTWRITEBYTECODE =

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## create .venv and install rankbench with its pinned dependencies

$(STAMP): pyproject.toml constraints.txt
	@echo "setup: installing into .venv; torch alone is 200 MB or more, so the first time takes minutes"
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup ## train a small model and take it apart, in 2 minutes and the time of setup; results land in outputs/
	$(BIN)/rankbench train experiment=demo

# After an interruption the same command continues. A preset without its text or checkpoint says so, and the others run.
laptop paper: setup ## run every preset at this budget, most claims an hour first, and write docs/results; continues
	-$(BIN)/rankbench data
	-$(BIN)/python -m paper_scale.queue $@
	$(BIN)/rankbench report experiment=all pages=docs/results

bench card laptop paper: export PYTHONPATH = $(CURDIR)/tests:$(CURDIR)
bench: setup ## time rankbench against the alternatives; BENCH="NAMES WORDS", see docs/BENCHMARKS.md
	$(BIN)/python -m benchmarks $(BENCH)

MINUTES ?= 13
card: setup ## on a machine with a GPU: its tests, the benchmarks' record and what fits of the presets, in MINUTES
	$(BIN)/python -m paper_scale.card $(MINUTES) $(PRESETS)

test: setup ## run the test suite, without tests of a second or more; of a test with many cases two
	$(BIN)/pytest $(TWO) -m 'pretend and not further and not slow and not gpu' tests/test_device.py
	$(BIN)/pytest $(TWO)

test-further: setup ## run the other cases of tests that have many, and tests of a second or more
	$(BIN)/pytest $(TWO) -m 'pretend and further and not slow and not gpu' tests/test_device.py
	$(BIN)/pytest $(TWO) -m 'further and not slow and not pretend'

test-slow: setup ## run the slow tests
	$(BIN)/pytest $(TWO) -m 'slow and pretend and not gpu' tests/test_device.py
	$(BIN)/pytest $(TWO) -m 'slow and not pretend'

test-gpu: setup ## run the tests that need a CUDA device
	$(BIN)/pytest -m gpu

# Kept apart from the environment's packages: the mere presence of the launchers doubles every command's start-up time.
EXTRAS := .venv/extras
$(EXTRAS)/.stamp: $(STAMP)
	@echo "setup: installing the extras into $(EXTRAS)"
	@$(BIN)/python -m pip install --quiet --upgrade --target $(EXTRAS) -c constraints.txt \
		$$($(BIN)/python -c "import tomllib; extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
		print(*[word for name, words in extras.items() if name != 'dev' for word in words])")
	@touch $@

test-extras: $(EXTRAS)/.stamp ## install the extras, and test launchers, search, writers and a real checkpoint with them
	PYTHONPATH=$(CURDIR)/$(EXTRAS) $(BIN)/pytest -m '' tests/commands/test_launchers.py tests/training/test_writers.py \
		tests/model/test_pretrained.py::test_a_real_albert tests/model/test_pretrained.py::test_the_spectrum_of_a_real_albert

SITE := outputs/site
site: $(EXTRAS)/.stamp ## build the documentation as a site with search in outputs/site/html
	@rm -rf $(SITE) && mkdir -p $(SITE) && cp -r docs $(SITE)/pages
	@cp -r CONTRIBUTING.md CHANGELOG.md CITATION.cff $(SITE)/pages/ && cp README.md $(SITE)/pages/index.md
	@mkdir $(SITE)/pages/tests && cp -r tests/example_plugin $(SITE)/pages/tests/
	@sed -i -e 's|](docs/|](|g' -e 's|](\.\./|](|g' $(SITE)/pages/*.md
	@PYTHONPATH=$(CURDIR)/$(EXTRAS) NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "-> $(SITE)/html/index.html"

test-slurm: $(EXTRAS)/.stamp ## as root, run sweeps on a Slurm of this machine (Debian: slurm-wlm, munge)
	PYTHONPATH=$(CURDIR)/$(EXTRAS) $(BIN)/pytest -m slurm -rs tests/commands/test_slurm.py

test-lowest: setup ## run commands, and tests of claims and tasks, with the lowest version of every dependency but torch
	.ci/lowest

campaigns: export PYTHONPATH = $(CURDIR)/tests:$(CURDIR)
campaigns: setup ## test kills, power cuts, full disks and nonsense input; writes docs/RELIABILITY.md, in an hour or so
	@$(BIN)/python -m campaigns | xargs -P 2 -n 1 $(BIN)/python -m campaigns

lint: setup ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## check the types of the package
	$(BIN)/mypy rankbench

format: setup ## fix what lint can fix by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

smoke: setup ## run every shipped preset at budget=smoke
	$(BIN)/pytest $(TWO) -m smoke tests/test_presets.py

docs: setup ## write docs/CONFIG.md, all keys, and docs/TABLES.md, all tables, from the code
	$(BIN)/python -m rankbench.commands.reference

wheel: setup ## build sdist and wheel, then run the wheel from an empty folder
	rm -rf dist
	$(BIN)/python -m build --no-isolation --quiet
	.ci/wheel_test

clean: ## remove caches and built files; keeps .venv and outputs/
	rm -rf dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find rankbench tests -type d -name __pycache__ -prune -exec rm -rf {} +
