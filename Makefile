# Every target sets itself up in .venv from python3 (3.10 or later), a C++ compiler and make.
# What is done is remembered in .venv/stamps, so a second run starts at once.

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
ARGS ?=
DATA ?=
PART ?= first
OP ?=
GPU_PYTHON ?= python3
# processes that share the tests; 0: pytest runs them itself, which --pdb needs
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? cores : 4)))
# 1 compiles the CUDA kernels on any machine, 0 nowhere; unset: where torch has CUDA (setup.py)
DYNEMB_CUDA ?=
export DYNEMB_CUDA
# 1 insists on liburing, 0 leaves it out; unset: where it is found (setup.py)
DYNEMB_URING ?=
export DYNEMB_URING
# beside the one in constraints.txt, with torch and FBGEMM of that version
TORCHREC_VERSIONS := 1.6.1 1.9.2
SPACE := $(subst ,, )

VENV := .venv
STAMPS := $(VENV)/stamps
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
PIP_INSTALL := $(PIP) install --quiet --constraint $(CONSTRAINTS)
LIBRARY := torch_dynemb/_C.abi3.so
KERNEL_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h')
# what the library was last compiled with; the other ones are gone
CUDA_FLAG := $(STAMPS)/cuda-$(or $(DYNEMB_CUDA),unset)
URING_FLAG := $(STAMPS)/uring-$(or $(DYNEMB_URING),unset)
# directories too: their times change when a file is removed
KERNEL_DIRECTORIES := $(shell find csrc -type d)
CXX_FILES = $(shell find csrc benchmarks tests tutorials -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h')

# ninja, and a compiler started by torch.compile, are looked up on PATH
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help build train test check test-marked test-touched test-long programs tsan test-torchrec-versions test-oldest-torch lint format docs bench bench-report bench-peers gpu-check wheel wheel-cpu wheel-cuda test-wheel clean

help:  ## this list
	@echo 'make TARGET [ARGS="..."]   ARGS goes to the program that the target runs'
	@awk -F ':.*##  *' '/^[a-z-]+:.*## / { gsub(/\$$\(OLDEST_TORCH\)/, "$(OLDEST_TORCH)"); \
		printf "  %-22s %s\n", $$1, $$2 }' Makefile
	@echo 'Variables: PYTHON=python3.12 for a new .venv; CONSTRAINTS=file for other versions than'
	@echo 'constraints.txt; PIP_INDEX_URL for a package index with, say, CPU builds of torch;'
	@echo 'WORKERS=0 to run tests in one process, which ARGS=--pdb needs;'
	@echo 'DYNEMB_CUDA=1 to compile the CUDA kernels also where torch has no CUDA; DYNEMB_URING=0 to'
	@echo 'build without liburing, 1 to insist on it.'

build: $(LIBRARY) $(STAMPS)/package  ## compile the kernels and install torch_dynemb into .venv, editable

train: build $(STAMPS)/train $(if $(findstring --torchrec,$(ARGS)),$(STAMPS)/torchrec)  ## train DLRM; on your files: make train DATA='path/to/*.tsv'
	$(VENV)/bin/python -m tutorials.dlrm.train $(DATA) $(ARGS)

# The tests of a file run in one process, because they share what takes long to make.
IN_PROCESSES := --numprocesses $(WORKERS) --dist loadfile
SHORT_TESTS := $(VENV)/bin/python -m pytest -m "not long and not page" --cpu-limit 1 $(IN_PROCESSES)
MARKED := --device marked --first-and-last
SET_UP_TESTS := build $(STAMPS)/test $(STAMPS)/torchrec $(STAMPS)/redis $(STAMPS)/cpp-server

# the second run is for tests that mix devices; ARGS choose tests, or a device, for the first
test: $(SET_UP_TESTS)  ## tests of at most a second each; files that changed also on a marked device
	cd tests && $(CURDIR)/$(VENV)/bin/python -m emulator.build  # a test that did it might take too long
	$(SHORT_TESTS) tests $(ARGS)
	$(if $(ARGS),,files=$$($(VENV)/bin/python tests/tools/touched_tests.py --changed) && \
	    test -z "$$files" || $(SHORT_TESTS) $$files $(MARKED))

test-marked: $(SET_UP_TESTS)  ## the tests of make test on tensors that behave as a GPU's beside others
	$(SHORT_TESTS) tests $(MARKED) $(ARGS)

check: build $(STAMPS)/test  ## schema, opcheck, errors, values and emulator of one op: make check OP=multi_hash
	@test -n '$(OP)' || { echo 'make check OP=name: which op of torch.ops.dynemb?' >&2; exit 1; }
	cd tests && $(CURDIR)/$(VENV)/bin/python -m emulator.build
	$(VENV)/bin/python tests/tools/check_op.py $(OP) $(ARGS)

test-touched: $(SET_UP_TESTS)  ## of test-long, for a quarter of an hour, what the commits since DYNEMB_BASE touch
	files=$$($(VENV)/bin/python tests/tools/touched_tests.py) && test -z "$$files" || \
	    $(VENV)/bin/python -m pytest $$files -m "long and not exhaustive" --timeout 1800 --skip-after 900 \
	    $(IN_PROCESSES) --no-loadscope-reorder $(ARGS)

test-long: $(SET_UP_TESTS)  ## tests of up to some minutes each
	$(VENV)/bin/python -m pytest tests -m long --timeout 3600 $(ARGS)

programs: build  ## frameworks of others into build/programs, for tests/programs in make test-long
	$(VENV)/bin/python tests/programs/fetch.py

tsan: $(STAMPS)/package  ## the store of rows and live tables under ThreadSanitizer; ARGS='--steps 6000' for longer
	$(VENV)/bin/python tests/tools/thread_checked.py $(ARGS)

test-torchrec-versions: build $(STAMPS)/test $(TORCHREC_VERSIONS:%=build/torchrec-%/installed)  ## the oldest and newest TorchRec
	DYNEMB_TORCHREC_VERSIONS=$(subst $(SPACE),:,$(TORCHREC_VERSIONS:%=$(CURDIR)/build/torchrec-%)) \
	    $(VENV)/bin/python -m pytest tests/sharding/test_versions.py --numprocesses $(WORKERS) $(ARGS)

# outside of the repository, because a download of half a gigabyte should serve all clones
OLDEST_TORCH := 2.11.0
TORCH_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/torch_dynemb

test-oldest-torch: build  ## the sources against the headers of torch $(OLDEST_TORCH), and the library in it
	$(VENV)/bin/python tests/tools/oldest_torch.py $(OLDEST_TORCH) --cache '$(TORCH_CACHE)' $(ARGS)

lint: $(STAMPS)/lint  ## ruff, mypy --strict on the package, clang-format, words and sentences of texts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --strict -p torch_dynemb
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)
	$(VENV)/bin/python tests/tools/prose.py

format: $(STAMPS)/lint  ## rewrite the sources as lint wants them
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

docs: build $(STAMPS)/docs $(STAMPS)/test $(STAMPS)/torchrec  ## run the programs of all pages; build/docs/index.html has guides, reference, benchmarks
	$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --quiet -c docs -d build/doctrees . build/docs $(ARGS)
	$(VENV)/bin/python -m pytest tests/project -m page $(IN_PROCESSES)

bench: build $(STAMPS)/test bench-peers  ## benchmarks, with the peers they compare with
	$(VENV)/bin/python benchmarks/run.py $(ARGS)

bench-report: $(STAMPS)/test  ## tables and plots of benchmarks/README.md from results/; ARGS=--check compares
	$(VENV)/bin/python benchmarks/report.py $(ARGS)

# no .venv and no pip: for a machine with a GPU and no network, with torch for CUDA in python3
gpu-check:  ## on a machine with a GPU: PART=first, suite or rest
	$(GPU_PYTHON) benchmarks/gpu/check.py $(PART) $(ARGS)

# WHEELS: cpu, or cuda with kernels for all architectures, or both
WHEELS ?= cpu cuda
wheel: $(STAMPS)/wheel  ## dist/torch_dynemb-*.whl; WHEELS=cpu for one without CUDA kernels
	rm -rf dist
	for variant in $(WHEELS); do $(MAKE) --no-print-directory wheel-$$variant || exit; done
	@ls dist/*.whl

wheel-cpu wheel-cuda: wheel-%: $(STAMPS)/wheel
	rm -rf build/lib.* build/bdist.* build/wheel-$*
	label=$$($(VENV)/bin/python tests/tools/wheels.py label $*) && \
	    DYNEMB_CUDA=$(if $(filter cuda,$*),1,0) DYNEMB_VERSION_LABEL=$$label \
	    $(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel-$* .
	$(VENV)/bin/python tests/tools/wheels.py repair build/wheel-$*/*.whl dist

test-wheel: wheel  ## the wheels and the source distribution, installed beside torch $(OLDEST_TORCH) and nothing else
	$(VENV)/bin/python tests/tools/wheels.py check dist/*.whl --torch $(OLDEST_TORCH) --cache '$(TORCH_CACHE)'

clean:  ## remove what was built; .venv stays
	rm -rf build dist *.egg-info torch_dynemb/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# pip is the last thing that venv installs, so an interrupted one is taken up again
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo 'PYTHON=$(PYTHON) should be Python 3.10 or later: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	    { echo 'python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }

# what setup.py needs (torch warns where numpy is missing), and a pip that knows dependency groups
$(STAMPS)/tools: $(CONSTRAINTS) | $(VENV)/bin/pip
	@mkdir -p $(STAMPS)
	$(PIP_INSTALL) 'pip>=25.1' torch numpy setuptools ninja
	@touch $@

$(CUDA_FLAG): | $(STAMPS)/tools
	@rm -f $(STAMPS)/cuda-*
	@touch $@

$(URING_FLAG): | $(STAMPS)/tools
	@rm -f $(STAMPS)/uring-*
	@touch $@

$(LIBRARY): setup.py $(KERNEL_SOURCES) $(KERNEL_DIRECTORIES) $(STAMPS)/tools $(CUDA_FLAG) $(URING_FLAG)
	@command -v $${CXX:-c++} >/dev/null || \
	    { echo "no C++ compiler $${CXX:-c++}: install g++ (Debian, Ubuntu: apt-get install g++) or set CXX" >&2; exit 1; }
	$(VENV)/bin/python setup.py --quiet build_ext --inplace
	@touch $@

$(STAMPS)/package: pyproject.toml setup.py $(STAMPS)/tools | $(LIBRARY)
	$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

# dependency groups of pyproject.toml; lint reads the sources and needs no compiled library
$(STAMPS)/train $(STAMPS)/test $(STAMPS)/lint $(STAMPS)/wheel $(STAMPS)/docs: $(STAMPS)/%: pyproject.toml $(STAMPS)/tools
	$(PIP_INSTALL) --group $*
	@touch $@

bench-peers: $(STAMPS)/torchrec $(STAMPS)/absl

# torchrec asks for fbgemm-gpu, which is the CUDA build and overwrites the files of fbgemm-gpu-cpu:
# without CUDA, torchrec is installed without what it asks for.
$(STAMPS)/torchrec: pyproject.toml $(STAMPS)/tools | $(STAMPS)/package
	if $(VENV)/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then \
	    $(PIP_INSTALL) --no-build-isolation --editable '.[torchrec]'; \
	else \
	    $(PIP_INSTALL) torch numpy fbgemm-gpu-cpu tensordict tqdm pyre-extensions && \
	    $(PIP_INSTALL) --no-deps torchrec; \
	fi
	@touch $@

# the stamp is in the directory, which `make clean` removes
build/torchrec-%/installed: $(STAMPS)/torchrec
	rm -rf $(@D)
	$(PIP) install --quiet --no-deps --target $(@D) torchrec==$*
	@touch $@

# as root or by sudo; RUNLEVEL=1: no server is started as a service
apt_install = APT='RUNLEVEL=1 apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq $(1)'; \
    if [ "$$(id -u)" = 0 ]; then sh -c "$$APT"; else sudo -n sh -c "$$APT"; fi

# the server that tests start
$(STAMPS)/redis: | $(STAMPS)/tools
	@command -v redis-server >/dev/null || command -v valkey-server >/dev/null || \
	    { $(call apt_install,redis-server); } || \
	    echo 'no redis-server or valkey-server: tests of Redis are skipped' >&2
	@touch $@

# what tutorials/serving/server.cpp includes
$(STAMPS)/cpp-server: | $(STAMPS)/tools
	@printf '#include <simdjson.h>\n#include <boost/beast/http/parser.hpp>\n' | \
	    $${CXX:-c++} -E -x c++ - >/dev/null 2>&1 || \
	    { $(call apt_install,libboost-dev libsimdjson-dev); } || \
	    echo 'no Boost.Beast or simdjson: tests of the C++ server are skipped' >&2
	@touch $@

# absl::flat_hash_map; the other hash map, ska::flat_hash_map, comes with torch's headers
$(STAMPS)/absl: | $(STAMPS)/tools
	@pkg-config --exists absl_flat_hash_map 2>/dev/null || \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        apt-get update -qq && apt-get install -y -qq pkg-config libabsl-dev; \
	    else \
	        echo 'benchmarks/index.py compares with absl::flat_hash_map, found by pkg-config. Install it:' \
	            'apt-get install pkg-config libabsl-dev, or dnf install pkgconf abseil-cpp-devel' >&2; \
	        exit 1; \
	    fi
	@touch $@
