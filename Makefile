# Everything goes through two commands: `make run` and `make test`. `make help` lists the rest.
# Settings: PYTHON=python3.12 picks the interpreter; CUDA=12 or 13 picks the CuPy build (found from the driver by default).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

DRIVER_CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
CUDA ?= $(if $(filter 13,$(DRIVER_CUDA)),13,12)
CONSTRAINTS := constraints/replay.txt $(if $(DRIVER_CUDA),,constraints/cpu.txt)
INSTALLED := $(VENV)/installed-cuda$(CUDA)$(if $(DRIVER_CUDA),,-cpu)

.DEFAULT_GOAL := help
.PHONY: help run test lab site setup model clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST)

run: setup model ## run every notebook: measure what this machine can, replay the rest
	$(BIN)/deepinfer-lab run

test: setup model ## run the whole suite: ruff, import-linter, pytest, pytest --nbval
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --nbval

lab: setup ## open JupyterLab on the start page
	$(BIN)/jupyter lab --notebook-dir=. notebooks/index.ipynb

site: setup ## write the notebooks as a static site to build/site/
	$(BIN)/deepinfer-lab site

setup: $(INSTALLED) ## create .venv and install (only when the dependencies changed)

model: setup ## obtain the default model (once)
	@$(BIN)/deepinfer-lab fetch smollm2-135m

clean: ## remove .venv and build/
	rm -rf $(VENV) build

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[cuda$(CUDA),test]' $(addprefix --constraint ,$(CONSTRAINTS))
	@touch $@
