.PHONY: install demo compare test slow bench lint docs
PY := .venv/bin/python
SEEDS ?= 0 1 2

install:
	@.ci/install

demo: install
	$(PY) -m fastsched.cli train --preset smollm2-cpu --run_dir runs/demo

compare: install
	$(PY) -m bench.learning.compare --preset tiny-cpu --seeds $(SEEDS)

test: install
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" -n 2 --dist loadfile

slow: install
	$(PY) -m pytest -m slow

bench: install
	$(PY) -m pytest bench

lint: install
	$(PY) -m ruff check .

docs: install
	$(PY) -m bench.documents
