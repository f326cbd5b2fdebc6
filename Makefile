# make check is what CI runs; it must pass before every commit.
PYTHON = $(shell ./setup.sh --dev --print_python)
BIN = $(dir $(PYTHON))

.PHONY: check quick test format

check:  ## form, lint, types, shell scripts, all tests
	.ci/run

quick:  ## the same with the quick tests only
	.ci/run --quick

test:
	./launch_examples.sh test

format:
	$(BIN)ruff format .
	$(BIN)ruff check --fix .
