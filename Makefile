# make reproduce   run the paper notebooks        (PROFILE=smoke|micro|micro-full|paper, OUT=folder, NOTEBOOKS="01 06_cae", DATA_ROOT=folder)
# make test        everything the project asks of a change: style, exports, notebooks, processes, the smoke reproduction
# make bench       the benchmark programs          (BENCH=name)
# make export      notebooks -> compvl/, formatted and clean
# make outputs     run library notebooks and guides, and keep what their examples show
# make readme      nbs/index.ipynb -> README.md
# make clean       build leftovers and caches; runs, reproductions and .venv stay
# Each sets up what it needs in .venv.

# Images of containers often set it: each of hundreds of processes would then compile what it imports
unexport PYTHONDONTWRITEBYTECODE

PYTHON  ?= python3
PROFILE ?= micro
OUT     ?= reproduction
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.compvl-installed
SOURCES := nbs tests scripts

.PHONY: reproduce test bench export outputs readme clean

reproduce: $(STAMP)
	$(BIN)/python -m compvl reproduce $(NOTEBOOKS) --profile $(PROFILE) --out "$(OUT)" $(if $(DATA_ROOT),--data-root "$(DATA_ROOT)")

test: $(STAMP)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff check --isolated --select F401 compvl
	$(BIN)/python scripts/check.py
	OMP_NUM_THREADS=1 $(BIN)/nbdev_test --path nbs/lib --n_workers 2 --do_print --timing
	OMP_NUM_THREADS=1 $(BIN)/nbdev_test --path nbs/guide --n_workers 2 --do_print
	tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && OMP_NUM_THREADS=1 COMPVL_RUNS="$$tmp/runs" $(BIN)/python -m compvl reproduce --profile smoke --out "$$tmp/out"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist loadfile tests

bench: $(STAMP)
	$(BIN)/python -m compvl bench $(BENCH)

export: $(STAMP)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_export

outputs: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/outputs.py $(NOTEBOOKS)

readme: $(STAMP)
	$(BIN)/python scripts/readme.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find compvl nbs scripts tests -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

$(STAMP): settings.ini setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "compvl needs Python 3.10 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	@touch $@
