# make reproduce   run the paper notebooks        (PROFILE=smoke|micro|micro-full|paper, OUT=folder, NOTEBOOKS="01 06_cae", DATA_ROOT=folder)
# make test        everything the project asks of a change: exports, notebooks, processes, the smoke reproduction
# make bench       the benchmark programs          (BENCH=name)
# make export      notebooks -> compvl/            make readme   nbs/index.ipynb -> README.md
# make clean       build leftovers and caches; runs, reproductions and .venv stay
# Each sets up what it needs in .venv.

PYTHON  ?= python3
PROFILE ?= micro
OUT     ?= reproduction
VENV    := .venv
PY      := $(VENV)/bin/python
STAMP   := $(VENV)/.compvl-installed

.PHONY: reproduce test bench export readme clean

reproduce: $(STAMP)
	$(PY) -m compvl reproduce $(NOTEBOOKS) --profile $(PROFILE) --out "$(OUT)" $(if $(DATA_ROOT),--data-root "$(DATA_ROOT)")

test: $(STAMP)
	$(PY) scripts/check.py
	OMP_NUM_THREADS=1 $(VENV)/bin/nbdev_test --path nbs/lib --n_workers 2 --do_print --timing
	tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && OMP_NUM_THREADS=1 COMPVL_RUNS="$$tmp/runs" $(PY) -m compvl reproduce --profile smoke --out "$$tmp/out"
	$(PY) -m pytest -q -n logical --maxprocesses 4 --dist loadfile tests

bench: $(STAMP)
	$(PY) -m compvl bench $(BENCH)

export: $(STAMP)
	$(VENV)/bin/nbdev_clean
	$(VENV)/bin/nbdev_clean --fname nbs/lib --clear_all
	$(VENV)/bin/nbdev_export

readme: $(STAMP)
	$(PY) scripts/readme.py

clean:
	rm -rf build dist *.egg-info .pytest_cache
	find compvl nbs scripts tests -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

$(STAMP): settings.ini setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "compvl needs Python 3.10 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --editable '.[dev]'
	@touch $@
