# make check is what CI runs; it must pass before every commit.
.PHONY: check test test-all soak format

check:  ## form, lint, types, shell scripts, all tests
	.ci/run

test:  ## each promise once
	./launch_examples.sh test

test-all:  ## all tests
	./launch_examples.sh test --all

soak:  ## random faults, until Ctrl-C
	./launch_examples.sh test --soak

format:  ## put all Python files into form
	python=$$(./setup.sh --dev --print_python) && \
	"$$python" -m ruff check --fix --quiet . && "$$python" -m ruff format .
