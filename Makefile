SHELL := bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
BIN := $(CURDIR)/.venv/bin
READY := .venv/.ready
export PATH := $(BIN):$(PATH)

.PHONY: help env demo test book docs record refresh clean

help:
	@echo "make demo                train a small language model on the standard library's source"
	@echo "make test                the whole gate"
	@echo "make book                the book's own rules only"
	@echo "make docs                the site, into _docs/"
	@echo "make record CHAPTER=10   on a GPU host: measure a chapter, write its records and figures"
	@echo "make refresh CHAPTER=10  run a chapter without a GPU and keep its outputs (CHAPTER=all for every one)"

env: $(READY)

$(READY): requirements-dev.txt setup.py settings.ini
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, and none was found on PATH"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq -r requirements-dev.txt
	$(BIN)/python -m pip install -qq --no-build-isolation --no-deps -e .
	if [ -d .git ]; then $(BIN)/nbdev_install_hooks; fi
	touch $@

demo: $(READY)
	$(BIN)/dormouse-train

test: export OMP_NUM_THREADS := 1
test: $(READY)
	$(BIN)/python tools/unchanged.py nbs dormouse_fused -- nbdev_export
	$(BIN)/python tools/unchanged.py nbs dormouse_fused -- nbdev_clean
	$(BIN)/ruff check
	$(BIN)/python tools/unchanged.py figures refs README.md -- pytest -n 2 --dist worksteal
	$(BIN)/python tools/unchanged.py figures refs -- nbdev_test --n_workers 2
	$(BIN)/python tools/aot.py
	$(BIN)/python tools/check_wheel.py
	$(BIN)/python tools/docs.py --fallback

book: $(READY)
	$(BIN)/python tools/check_book.py

docs: $(READY)
	$(BIN)/python tools/docs.py

record: $(READY)
	$(BIN)/python tools/record.py $(CHAPTER)

refresh: $(READY)
	$(BIN)/python tools/refresh.py $(CHAPTER)

clean:
	rm -rf _docs _proc build dist *.egg-info .pytest_cache .ruff_cache
