# SPDX-License-Identifier: Apache-2.0
# Every target works on a fresh clone: it builds what it needs first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PY := .venv/bin/python
QUIETLY := tools/quietly.sh
REPORTS := build/rings
CXX_FILES = $(shell git ls-files -co --exclude-standard '*.cpp' '*.hpp' '*.h')
LAUNCHER := $(shell command -v ccache)
.PHONY: help packages build sanitized wheels try-wheels gpu-bundle matrix vm-kernel demo cross test test-cpp test-model test-fuzz test-vm test-rdma test-qemu test-python test-native test-types test-one-core test-long ebpf kernel fuzz frameworks lint fmt types bench figures comparison pictures architecture models quality drift docs testbed simulate congestion ablation clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

packages:
	@$(if $(BUILT)$(PACKAGES),,tools/build.sh --packages)

build:  ## make .venv, install what is missing, build the native extensions
	@$(if $(BUILT),,tools/build.sh)

wheels: build  ## wheels and sdists of sennit and sennit-torch, audited, in build/wheels and build/sdists
	@tools/wheels.sh

try-wheels: wheels  ## do with them what the README says, without a compiler, root, an index or a network, and time it
	@tools/try_wheels.sh

gpu-bundle:  ## a folder that builds and measures sennit on a GPU machine without a network, with FOR_PYTHON=3.12 there
	@/usr/bin/env python3 -m tools.gpu_bundle build/gpu-bundle $(if $(FOR_PYTHON),--python $(FOR_PYTHON))

matrix:  ## wheels, first AllReduce, training and quick tests with every Python and CPU build of torch to be had
	@/usr/bin/python3 -m tools.matrix

demo: build  ## train a DLRM on real flights with 2 ranks over sennit
	@$(PY) -m sennit demo

# While Python packages are installed, half of the machine is idle. So what needs only system packages is compiled then,
# and does not ask for those again: `build` has the lock by then.
# Python tests often wait, so that they run in two processes, with the other rings beside them. What is compiled or
# checked meanwhile is nice to them: they have deadlines. RDMA comes last, beside what needs one core and is nice: on a
# busier machine the VM's one processor stands still for so long that reliable queue pairs break.
test: packages  ## every test that can run on this machine
	@failed=0; rm -rf $(REPORTS); mkdir -p $(REPORTS); \
	$(MAKE) --no-print-directory --keep-going PACKAGES=yes --jobs 3 test-python test-native test-types || failed=1; \
	$(MAKE) --no-print-directory --keep-going --jobs 2 BUILT=yes test-rdma test-one-core || failed=1; \
	$(PY) -m sennit.testbed.rings $(REPORTS) || failed=1; \
	exit $$failed

# The output of each ring comes when it has ended, between lines of the Python tests. The kernel and the tests that need
# it are beside the C++ tests: each has parts that use one core, or wait.
test-native: build sanitized
	@$(MAKE) --no-print-directory --keep-going --output-sync=target BUILT=yes test-vm test-cpp

test-types: build
	@nice $(MAKE) --no-print-directory --output-sync=target BUILT=yes types

test-one-core: build
	@nice $(MAKE) --no-print-directory --keep-going --output-sync=target BUILT=yes test-model test-fuzz

sanitized: packages
	@cmake -S . -B build/asan -G Ninja -DSENNIT_TESTS=ON -DSENNIT_SANITIZE=ON -DSENNIT_PYTHON=OFF \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER_LAUNCHER=$(LAUNCHER) --log-level=WARNING >/dev/null
	@echo "test: building the C++ tests under sanitizers"
	@$(QUIETLY) build/asan.log nice cmake --build build/asan

test-cpp: sanitized  ## C++ tests with address and undefined-behaviour sanitizers
	@mkdir -p $(REPORTS)
	@ctest --test-dir build/asan --output-on-failure --no-tests=error --timeout 300 --parallel 2 \
	  --output-junit $(CURDIR)/$(REPORTS)/cpp.xml

MODEL := cmake -S . -B build/model -G Ninja -DSENNIT_TESTS=ON -DSENNIT_PYTHON=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_COMPILER_LAUNCHER=$(LAUNCHER) --log-level=WARNING >/dev/null
MODELS := fault_model fault_model_small exchange_model
test-model: build  ## schedules of faults against the real flow, and of exchanges among ranks, without sanitizers
	@$(MODEL)
	@$(QUIETLY) build/model.log nice cmake --build build/model --target $(MODELS)
	@mkdir -p $(REPORTS)
	@ctest --test-dir build/model -L model --output-on-failure --no-tests=error \
	  --output-junit $(CURDIR)/$(REPORTS)/model.xml

test-fuzz: build  ## a second of each fuzzer
	@tools/fuzz.sh 1

# It runs the programs that `make test-model` builds, and one more.
PARTS ?=
test-long: build sanitized test-model  ## what takes too long for `make test`; PARTS="model,tables" for some; docs/lab/long-tests.md
	@$(QUIETLY) build/model.log nice cmake --build build/model --target recovery_ablation
	@$(PY) -m sennit.testbed.long_tests --parts "$(PARTS)"

# libibverbs is opened at run time, so that its headers are all that is needed, and they fit every processor. Which
# tests are left out, and why: docs/how-to/run-tests.md.
CROSS := build/aarch64
CROSS_TESTS := wire without_libraries fold codec messages trial team counter_page records receiver kernels memory
cross:  ## C++ tests for Arm cores, in QEMU's user mode: needs g++-aarch64-linux-gnu and qemu-user
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || \
	  { echo "cross: nothing was built: install g++-aarch64-linux-gnu and qemu-user" >&2; exit 69; }
	@mkdir -p $(CROSS)-headers && ln -sfn /usr/include/infiniband /usr/include/rdma $(CROSS)-headers
	@cmake -S . -B $(CROSS) -G Ninja --toolchain tools/aarch64.cmake -DSENNIT_TESTS=ON -DSENNIT_PYTHON=OFF \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DIBVERBS_INCLUDE=$(CURDIR)/$(CROSS)-headers \
	  -DCMAKE_CXX_COMPILER_LAUNCHER=$(LAUNCHER) --log-level=WARNING >/dev/null
	@$(QUIETLY) $(CROSS).log nice cmake --build $(CROSS) --target $(CROSS_TESTS:%=test_%)
	@ctest --test-dir $(CROSS) --output-on-failure --no-tests=error --timeout 900 --parallel 2 \
	  -R '^test_($(subst $() ,|,$(CROSS_TESTS)))$$'

SECONDS ?= 600
fuzz: build  ## libFuzzer on the parsers, decoders and the flow, SECONDS=600 each
	@tools/fuzz.sh $(SECONDS)

ebpf: build  ## compile the BPF programs into build/ebpf, and name what this kernel lacks
	@$(PY) -m sennit.ebpf build/ebpf

kernel: build  ## the kernel of the soft-RoCE VM, built into the cache: minutes once, then at once
	@$(PY) -m sennit testbed kernel

# 69 says that no kernel runs here: whether that is right, the end of `make test` says.
vm-kernel: build
	@$(PY) -m sennit testbed kernel >/dev/null || [ $$? = 69 ]

# RING_OPTIONS: of pytest, such as --long.
# $(1): auto, uml or qemu. sysexits.h: 69 says that this machine can run no such kernel; why, it has said itself.
# Emulation is slow, so that tests may take three times as long there. One that hangs ends long before the ring does.
# 125 says that the guest's kernel panicked or hung. The end of its console stands above.
ring = code=0; ready=$$($(PY) -m sennit testbed kernel $(1)) || code=$$?; \
  case "$$code $$ready" in \
    "0 "*/kernel-qemu-*) kind=qemu limit_s=1800 test_s=450 ;; \
    "0 "*) kind=uml limit_s=600 test_s=150 ;; \
    69*) echo "test: the rdma ring is skipped: no kernel for it runs on this machine"; exit 0 ;; \
    *) exit $$code ;; \
  esac; \
  echo "test: the rdma ring runs in $$kind"; \
  $(PY) -m sennit testbed vm --kernel $$kind --timeout $$limit_s --bring-back build/rdma --bring-back $(REPORTS) -- \
    $(PY) -m pytest -m rdma $(RING_OPTIONS) --timeout $$test_s -o faulthandler_timeout=$$((test_s + 30)) \
    --junitxml $(REPORTS)/rdma.xml tests/rdma

# Apart from the other Python tests, because they need the kernel.
VM_TESTS := tests/testbed/test_vm.py
test-vm: build vm-kernel  ## tests of the command that runs a program in the VM
	@$(PY) -m pytest --junitxml $(REPORTS)/vm.xml $(VM_TESTS)

test-rdma: build  ## tests over RDMA verbs, in a VM with soft-RoCE: User-Mode Linux where it boots, else QEMU
	@$(call ring,auto)

test-qemu: RING_OPTIONS := --long
test-qemu: build  ## the same in QEMU with Debian's kernel and two processors: slow, finds races that one has not
	@$(call ring,qemu)

# Many containers set PYTHONDONTWRITEBYTECODE. Then each process would compile our sources anew, and in CI packages, too.
test test-python: export PYTHONDONTWRITEBYTECODE :=
test-python: build  ## Python tests, all rings that can run here
	@$(PY) -m sennit trace headers >/dev/null || echo "test: bcc sessions are skipped"
	@$(PY) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --ignore $(VM_TESTS) \
	  --durations 30 --durations-min 5 --junitxml $(REPORTS)/python.xml

frameworks:  ## install Lightning, Accelerate and TorchRec, and run the tests and examples of others over sennit
	@tools/build.sh frameworks bench-fbgemm
	@$(PY) -m pytest -v --long tests/runtime/frameworks

lint: build  ## ruff and clang-format, changing nothing
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@.venv/bin/clang-format --dry-run -Werror $(CXX_FILES)

fmt: build  ## let ruff and clang-format rewrite the sources
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@.venv/bin/clang-format -i $(CXX_FILES)

# In CI a fresh clone finds what mypy knew of the one before in its place: most of its time goes to torch's sources.
ifeq ($(CI),true)
types: export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/sennit/mypy$(subst /,-,$(CURDIR))
endif
types: build  ## mypy --strict
	@$(PY) -m mypy

BENCH := $(PY) -m sennit bench collectives
bench:  ## collectives beside gloo, OpenMPI and a bare UDP transfer; the figures of docs/performance.md
	@tools/build.sh mpi
	@for run in "shm 2" "shm 4" "shm 8" "udp 2" "udp 8"; do set -- $$run; \
	  $(BENCH) --against gloo --against openmpi --transport $$1 --world $$2 \
	    --json build/bench-$$1-$$2.json --plot build/bench-$$1-$$2.png; done
	@for world in 2 4 8; do \
	  $(BENCH) --core --against openmpi --transport shm --world $$world --sizes 4KiB,64KiB \
	    --json build/bench-core-shm-$$world.json; done
	@$(BENCH) --core --against udp-bare --transport udp --sizes 64MiB --json build/bench-core-udp.json

ONLY ?=
figures:  ## docs/performance.json anew, by its commands, on a quiet machine; ONLY="collectives" for some
	@tools/build.sh mpi bench-fbgemm
	@$(PY) -m sennit.testbed.bench.figures.measured_figures docs --only "$(ONLY)"

comparison:  ## docs/comparison.md anew, with every peer that can be installed
	@tools/build.sh mpi bench-fbgemm
	@$(PY) -m sennit bench all --report build/comparison
	@cp build/comparison/comparison.json docs/comparison.json
	@$(PY) -m sennit.testbed.bench.comparison_page docs

pictures: build  ## docs/performance.md, its pictures and the README's figures, from docs/performance.json
	@$(PY) -m sennit.testbed.bench.figures.performance_page docs

architecture: build  ## the pictures of docs/architecture.md, from the imports of the sources
	@$(PY) -m sennit.testbed.import_graph docs/architecture.md

models: build  ## the tables of docs/models.md: models of the Neo paper on its cluster, from examples/*.toml
	@$(PY) -m sennit.testbed.models_page docs/models.md

SEEDS ?= 3
QUALITY_WAYS := fp32 "plain torch" "parameter server" "exchange bf16" "exchange fp8" "exchange int8" "tables fp16"
QUALITY := $(PY) -m sennit bench quality --seeds $(SEEDS) --batch-sizes 256,8192,16384 --warmup 0.5 --same-time
quality: build  ## the tables and pictures of docs/quality.md, on three data sets with SEEDS=3
	@mkdir -p build/quality
	@only=(); for way in $(QUALITY_WAYS); do only+=(--only "$$way"); done; \
	for run in "flights 1" "movielens 4" "adult 4"; do set -- $$run; \
	  $(QUALITY) "$${only[@]}" --data $$1 --epochs $$2 --resume --json build/quality/$$1.json; done
	@$(PY) -m sennit.testbed.bench.training.quality_page docs build/quality/{flights,movielens,adult}.json
	@rm build/quality/*.json  # what is there when it begins is of a run that was ended

drift: build  ## what it costs to train late or without new ids; writes docs/lab/drift.md
	@mkdir -p build/drift
	@for days in 20 60; do \
	  $(PY) -m sennit bench drift --drift-days $$days --life-days $$days --json build/drift/$$days.json; done
	@$(PY) -m sennit.testbed.bench.training.drift_page docs/lab build/drift/{20,60}.json

docs: build  ## the documentation as a site: build/site/index.html
	@NO_MKDOCS_2_WARNING=1 $(QUIETLY) build/docs.log $(PY) -m mkdocs --quiet build --strict
	@echo "docs: build/site/index.html"

simulate: build  ## the transport in fabrics of 1,024 simulated hosts; writes docs/lab/simulation.md
	@$(PY) -m sennit testbed simulate --page docs/lab/simulation.md

NETWORKS ?= 100000
ablation: build  ## what each mechanism of loss recovery earns in simulated networks; writes docs/lab/recovery.md
	@$(MODEL)
	@$(QUIETLY) build/model.log nice cmake --build build/model --target recovery_ablation
	@build/model/transport/csrc/tests/networks/recovery_ablation --networks $(NETWORKS) >build/ablation.jsonl
	@$(PY) -m sennit.testbed.simulation.recovery_page docs build/ablation.jsonl

congestion: build  ## who yields to whom on one simulated link; writes docs/lab/congestion.md
	@$(MODEL)
	@$(QUIETLY) build/model.log nice cmake --build build/model --target simulated_networks
	@build/model/transport/csrc/tests/networks/simulated_networks >build/congestion.jsonl
	@$(PY) -m sennit.testbed.simulation.congestion_page docs build/congestion.jsonl

testbed: build  ## every scenario of loss and failure at full size, as root; report in build/testbed/report.html
	@$(PY) -m sennit testbed run all

clean:  ## remove everything that the other targets made
	rm -rf build .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
