# `make demo` and `make test` need nothing but Python 3.10+, pip and this folder.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_FLAGS ?=
SEED ?= 0
MINUTES ?= 10
SECONDS ?= 60
# Tests mostly wait, so several processes run them. Those of one file share fixtures, and one process.
# The order is that of tests/conftest.py: xdist's own would start the files with few tests last.
RUNNERS ?= 5
PARALLEL ?= -n $(RUNNERS) --dist loadfile --no-loadscope-reorder
# Compiled modules are kept: hundreds of processes import them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick check style types layers collect docs proto proto-check bench soak soak-rounds sim programs chaos clean

demo: $(READY)
	$(BIN)/python -m tools.demo $(DEMO_FLAGS)

test: $(READY)
	rm -f .pytest_cache/v/cache/lastfailed
	$(BIN)/python -m pytest $(PARALLEL) || $(BIN)/python tests/second_look.py

# The core, rpc and all units: what starts no process. The simulator is left to `make test`. These
# tests compute, and each process that runs some imports torch and all tests first.
quick: RUNNERS = 3
quick: $(READY)
	$(BIN)/python -m pytest -q -m "not processes" --ignore tests/tools/sim $(PARALLEL)

check: style types layers proto-check docs collect

style: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(BIN)/lint-imports

# All tests can be imported. This compiles them, too, which else each process of `make test` does.
collect: $(READY)
	$(BIN)/python -m pytest --collect-only -q > /dev/null

# The site in build/site. Every warning is an error: a link, an anchor, a docstring.
docs: $(READY)
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html -c docs . build/site

bench: $(READY)
	$(BIN)/python -m tools.benchmarks

soak: $(READY)
	$(BIN)/python -m tools.demo --kills 50 --kill-interval 3 --seed $(SEED) --report demo-report-soak.png

soak-rounds: $(READY)
	PYTHONPATH=tests:. $(BIN)/python -m support.soak_rounds --rounds 20000 --seed $(SEED)
	PYTHONPATH=tests:. $(BIN)/python -m support.quorum_load --rounds 50
	PYTHONPATH=tests:. $(BIN)/python -m support.quorum_load --jobs 100 --rounds 10

# Explores fresh seeds, unless SEED names the first one.
sim: $(READY)
	$(BIN)/python -m tools.sim --seconds $(SECONDS) $(if $(filter 0,$(SEED)),,--seed $(SEED))

# Draws fresh programs, unless SEED names the first one.
programs: $(READY)
	$(BIN)/python -m tools.matrix --seconds $(SECONDS) $(if $(filter 0,$(SEED)),,--seed $(SEED))

chaos: $(READY)
	$(BIN)/python -m tools.chaos --minutes $(MINUTES) --seed $(SEED)

proto: $(READY)
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=torchft_svc/proto --pyi_out=torchft_svc/proto proto/torchft.proto proto/etcd.proto

proto-check: $(READY)
	$(BIN)/python -m pytest -q tests/test_proto.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis demo-report* chaos-report*

$(READY): pyproject.toml constraints.txt
	@echo "installing torch and the tools into $(VENV): this takes some minutes, without any output"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dashboard,demo,dev,docs,metrics,otel,ray,torchx]'
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null || true  # some are for another Python
	touch $(READY)
