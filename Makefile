# Every step of CI can be run at home: CI calls these targets and nothing else.
VENV := .venv
PY := $(VENV)/bin/python
UV := $(shell command -v uv 2>/dev/null)
NEXTEST := $(shell command -v cargo-nextest 2>/dev/null)
MODEL ?= gemma
FUZZ_SECONDS ?= 60
EMU_TESTS := cargo test -p kvrs-cuda --features emulate --tests
# Whole stores are left out: their threads are Rust's, whose locks a compiler without TSan does not show to it.
TSAN_TESTS := cargo test -p kvrs-cuda --features emulate --lib --test attend --test bytes --test 'emulator*'
SANITIZER = echo 'int main(){}' | $(or $(CXX),g++) -fsanitize=$(1) -x c++ - -o /dev/null 2>/dev/null
UNDER_VALGRIND := --config "target.'cfg(all())'.runner = 'valgrind -q --error-exitcode=1'"
export PYTHONPATH := $(CURDIR)
export UV_LINK_MODE ?= hardlink

RUST_SOURCES := $(shell find crates -name '*.rs' -o -name Cargo.toml) Cargo.toml $(wildcard Cargo.lock)

.PHONY: help setup build deny test test-rust test-python lint demo eval quantisers policies bench bench-qwen bench-record sanitize soak fuzz golden test-emu sanitize-emu cuda cuda-gate gpu-check clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.setup: pyproject.toml
ifneq ($(UV),)
	uv venv -q $(VENV) --allow-existing
	uv pip install -q --python $(PY) --group dev
else
	python3 -m venv $(VENV)
	$(PY) -m pip install -q --upgrade 'pip>=25.1'
	$(PY) -m pip install -q --group dev
endif
	touch $@

$(VENV)/.built: $(VENV)/.setup $(RUST_SOURCES)
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(VENV)/bin/maturin develop --release -q $(if $(UV),--uv)
	touch $@

setup: $(VENV)/.setup ## make .venv with everything that the other targets need
deny: ## licences and sources of dependencies (needs cargo-deny)
	cargo deny check licenses bans sources

build: $(VENV)/.built ## compile the extension into .venv

test: test-rust test-python ## all tests, Rust and Python

test-rust:
ifneq ($(NEXTEST),)
	cargo nextest run --workspace --no-fail-fast
else
	cargo test --workspace --lib --bins --tests
endif
	cargo test -q --doc --workspace

test-python: build
	$(PY) -m pytest -q
	KVRS_ISA=scalar $(PY) -m pytest -q tests/python/test_api.py tests/python/test_cases.py tests/python/test_fixtures.py

sanitize: ## the CPU backend's tests under valgrind, which knows AVX2 but no AVX-512
	PROPTEST_CASES=6 cargo test -p kvrs-cpu $(UNDER_VALGRIND) --lib --test pages
	PROPTEST_CASES=20 cargo test -p kvrs-cpu $(UNDER_VALGRIND) --test attend -- attention_on_random

lint: build ## formatting, clippy, docs, ruff, mypy, stubs, golden files
	cargo fmt --check
	cargo clippy -q --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc -q --workspace --no-deps
	$(VENV)/bin/ruff check python tests benches kernels_cu
	$(VENV)/bin/ruff format --check python tests benches kernels_cu
	$(PY) -m mypy
	$(PY) -m mypy.stubtest kvrs._kvrs
	$(PY) -m tests.reference.golden --check
	$(PY) -m tests.cases --check

soak: ## 200 long lives of a store with faults, beside plain vectors (KVRS_SOAK_SEEDS, KVRS_SOAK_STEPS)
	KVRS_SOAK_SEEDS=$${KVRS_SOAK_SEEDS:-200} cargo test --release -p kvrs-testkit --test soak -- --nocapture

# What cargo-fuzz passes to the compiler, without the sanitizer: a stable compiler takes it too.
COVERAGE := -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
FUZZ_TARGETS := sequence plan page

fuzz: ## each fuzz target for FUZZ_SECONDS (60); under a sanitizer with cargo-fuzz and a nightly compiler
	@mkdir -p $(FUZZ_TARGETS:%=build/fuzz/%)
	@if cargo fuzz --version >/dev/null 2>&1 && rustc +nightly --version >/dev/null 2>&1; then \
	  for target in $(FUZZ_TARGETS); do \
	    cargo +nightly fuzz run $$target build/fuzz/$$target tests/data/fuzz/$$target -- -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	  done; \
	else \
	  RUSTFLAGS="$(COVERAGE)" cargo build -q --release --manifest-path fuzz/Cargo.toml --target $(HOST) --target-dir fuzz/target && \
	  for target in $(FUZZ_TARGETS); do \
	    fuzz/target/$(HOST)/release/$$target build/fuzz/$$target tests/data/fuzz/$$target \
	      -max_total_time=$(FUZZ_SECONDS) -artifact_prefix=build/fuzz/$$target- -print_final_stats=1 -verbosity=0 || exit 1; \
	  done; \
	fi

demo: build ## read 4k tokens with a hidden passkey into a packed store, answer from it (MODEL=gemma|qwen)
	@$(PY) -m kvrs.demo --model $(MODEL) $(if $(JSON),--json)

eval: build ## perplexity and passkey on real models; JSON under docs/results (MODEL=gemma|qwen|all; Qwen takes an hour)
	$(PY) -m kvrs.eval.suite --model $(MODEL)

quantisers: build ## write the tables of docs/quantisers.md from docs/results
	$(PY) -m kvrs.eval.quantisers

policies: build ## draw what each policy keeps of a real text; pictures under docs/policies (MODEL=gemma|qwen)
	$(PY) -m kvrs.eval.pictures --model $(MODEL) --out docs/policies

bench: build ## kvrs beside its peers: a decode step, policies, tokens/s and prefill on Gemma; files under build/bench
	$(PY) -m benches.decode --json build/bench/decode.json --plot build/bench/decode.png
	$(PY) -m benches.policy --json build/bench/policy.json
	$(PY) -m benches.codecs --json build/bench/codecs.json
	$(PY) -m benches.endtoend --json build/bench/endtoend-gemma.json
	$(PY) -m benches.prefill --json build/bench/prefill-gemma.json

bench-qwen: build ## tokens/s of Qwen's decode step at 4k and 16k tokens (needs 12 GB of memory)
	$(PY) -m benches.endtoend --model qwen --json build/bench/endtoend-qwen.json

bench-record: build ## cargo bench, kept with machine and date under benches/record
	$(PY) -m benches.kernels

test-emu: ## every CUDA kernel in the emulator, against the scalar code
	$(EMU_TESTS)

sanitize-emu: ## the emulated kernels under ASan and UBSan, and small shapes under TSan
	@if $(call SANITIZER,address) && $(call SANITIZER,undefined); then \
	  KVRS_EMU_SANITIZE=address,undefined CARGO_TARGET_DIR=target/asan PROPTEST_CASES=4 $(EMU_TESTS); \
	else echo "NOT RUN: libasan or libubsan is missing, kernels were not sanitized"; fi
	@if $(call SANITIZER,thread) && setarch -R true; then \
	  KVRS_EMU_SANITIZE=thread CARGO_TARGET_DIR=target/tsan PROPTEST_CASES=2 \
	  TSAN_OPTIONS=suppressions=$(CURDIR)/kernels_cu/emu/tsan.supp setarch -R $(TSAN_TESTS); \
	else echo "NOT RUN: libtsan or setarch is missing, races were not looked for"; fi

cuda: $(VENV)/.setup ## compile the CUDA kernels for every architecture, without a GPU; files under build/cuda
	$(PY) -m kernels_cu.tools.compile

cuda-gate: cuda ## registers, spills, occupancy and instructions of the compiled kernels against kernels_cu/gate.json
	$(PY) -m kernels_cu.tools.gate

gpu-check: cuda ## on a machine with a GPU: conformance, then speed beside torch and FlashInfer; files under build/bench
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(VENV)/bin/maturin develop --release -q --features cuda $(if $(UV),--uv)
	KVRS_CUDA_KERNELS=$(CURDIR)/build/cuda/check.kvcuda \
	  cargo test -q --release -p kvrs-cuda --features cuda --test emulator_intrinsics --test device --no-run
	$(PY) -m benches.gpu_check --json build/bench/gpu.json

golden: build ## write the golden files again from the NumPy reference
	$(PY) -m tests.reference.golden

clean: ## remove what was built
	rm -rf target $(VENV) build
