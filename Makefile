# make check is what CI runs; it must pass before every commit.
.PHONY: check quick test format

check:  ## form, lint, types, shell scripts, all tests
	.ci/run

quick:  ## the quick tests only
	./launch_examples.sh test --quick

test:  ## all tests
	./launch_examples.sh test

format:  ## put all Python files into form
	python=$$(./setup.sh --dev --print_python) && \
	"$$python" -m ruff check --fix --quiet . && "$$python" -m ruff format .
