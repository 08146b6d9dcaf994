# wardround: two commands to know, `make run` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: run test lint types soak format carry clean

run: $(READY)  ## the built-in study: a results table and the path of an HTML page
	$(BIN)/wardround compare fedbicross local ensemble fedavg --rounds 1 --epochs 40

test: $(READY) lint types  ## everything that must hold for every commit
	sh tests/browser.sh
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

soak: $(READY)  ## what takes longer: kill at random moments, many inputs, many rounds
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 WARDROUND_SOAK=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m soak

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

carry: $(READY)  ## the packages a bare GPU machine lacks, for its Python (make carry GPU_PYTHON=3.12), in .carry/site
	rm -rf .carry/site
	$(BIN)/python -m pip install --quiet --target .carry/site --python-version $(or $(GPU_PYTHON),3.12) \
		--only-binary=:all: --no-deps -c constraints.txt pydantic pydantic-core annotated-types typing-inspection typing-extensions
