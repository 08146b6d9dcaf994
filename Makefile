# wardround: two commands to know, `make run` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEV := .venv/.dev
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
EXTRAS ?= sites,onnx

.PHONY: run test lint types soak format wheelhouse carry clean

run: $(READY)  ## the built-in study: a results table and the path of an HTML page
	$(BIN)/wardround compare fedbicross local ensemble fedavg --alpha 0.2 --rounds 1 --epochs 30

test: $(DEV) lint types  ## everything that must hold for every commit
	sh tests/browser.sh
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

soak: $(DEV)  ## what takes longer: kill at random moments, many inputs, many rounds
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 WARDROUND_SOAK=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m soak

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $(READY)

$(DEV): $(READY)
	$(PIP) -e ".[dev]"
	touch $(DEV)

wheelhouse: $(READY)  ## a folder that installs wardround where there is no network: dist/wheelhouse
	$(BIN)/python tools/wheelhouse.py build dist/wheelhouse --extras "$(EXTRAS)"

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

carry: $(READY)  ## the packages a bare GPU machine lacks, for its Python (make carry GPU_PYTHON=3.12), in .carry/site
	rm -rf .carry/site
	$(BIN)/python -m pip install --quiet --target .carry/site --python-version $(or $(GPU_PYTHON),3.12) \
		--only-binary=:all: --no-deps -c constraints.txt pydantic pydantic-core annotated-types typing-inspection typing-extensions
