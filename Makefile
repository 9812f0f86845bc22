# Every target does its own set-up: the first run installs, the next ones start at once.

PYTHON ?= $(firstword $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done) python3)
BIN := .venv/bin
SET_UP := .venv/.set-up
SET_UP_DEV := .venv/.set-up-dev
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Builds of source packages, our own among them, keep to the pinned versions as well.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

# Images of containers set it, and then each of a thousand processes compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test check bench soak docs clean java servers
.NOTPARALLEL:

run: NAME = shop
run: $(SET_UP) java  ## a live PostgreSQL mirrored into Delta, every row compared; NAME=quickstart: two million generated rows; NAME=messages: bad messages and their replay; NAME=lake: the same PostgreSQL into Delta and Iceberg in an S3 server
	@$(BIN)/python examples/$(NAME).py

# More than there are cores, since many tests wait for servers; those of FAST=1 do not.
JOBS ?= $(if $(FAST),2,4)
# In the order of tests/conftest.py, the longest groups first, and not the groups with the most tests.
WORKERS := --numprocesses=$(JOBS) --dist=loadgroup --no-loadscope-reorder

# In so many short runs a fifth of the time would go into the file system of a disk.
test: export TMPDIR := $(or $(TMPDIR),$(shell grep -qs ' /dev/shm .*noexec' /proc/mounts || \
	df -P -k /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 8000000 { print $$6 }'))
test: $(SET_UP_DEV) $(if $(FAST),,java servers)  ## all tests, JOBS at once; FAST=1: those without servers, Spark and many processes; ARGS= goes to pytest
	@$(BIN)/python -m pytest $(WORKERS) $(if $(FAST),-m 'not soak and not processes' $(wildcard tests/test_*.py)) $(ARGS)

check: $(SET_UP_DEV)  ## style, types, and generated pages that match the code
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m penstock.reference docs --check
	@$(BIN)/python bench/measure.py

bench: $(SET_UP_DEV) java  ## all benches, or NAME= one
	@set -e; for script in $(if $(NAME),bench/$(NAME).py,$(sort $(wildcard bench/[a-z]*.py))); do $(BIN)/python $$script; done

soak: $(SET_UP_DEV) java  ## all soaks, or NAME= one; NAME=tests: the tests, with all that `make test` leaves out
ifeq ($(NAME),tests)
	@$(BIN)/python -m penstock.testing.azure --is-installed || { \
		echo "fetching Azure's emulator (360 MB); only this once" && $(BIN)/python -m penstock.testing.azure; } || true
	@$(BIN)/python -m penstock.testing.hive --is-installed || { \
		echo "fetching Hive's metastore (90 MB); only this once" && $(BIN)/python -m penstock.testing.hive; } || true
	@$(BIN)/python -m penstock.testing.spark_reader --is-installed || { \
		echo "fetching Spark with the jars of Delta and Iceberg (600 MB); only this once" && \
		$(BIN)/python -m penstock.testing.spark_reader; } || true
	@PENSTOCK_THOROUGH=1 $(BIN)/python -m pytest $(WORKERS) -m 'soak or not soak' $(ARGS)
else
	@set -e; for script in $(if $(NAME),bench/soak/$(NAME).py,$(sort $(wildcard bench/soak/[a-z]*.py))); do $(BIN)/python $$script; done
endif

docs: $(SET_UP_DEV)  ## write the generated pages, and the site with its search to build/site
	@$(BIN)/python -m penstock.reference docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:  ## everything that running and testing left; .venv stays
	rm -rf run state build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log
	find src tests examples bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# An empty .venv is finished by the next call: the stamps are written last.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Penstock needs Python 3.11 or newer, and $(PYTHON) is not; name another: make PYTHON=/path/to/python3.12" >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		apt-get -qq update && apt-get -qq install -y python3-venv >/dev/null; } || { \
		echo "$(PYTHON) cannot make a virtual environment: sudo apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv .venv

$(SET_UP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into .venv; only this once"
	@$(INSTALL) -c constraints.txt -e '.[demo]'
	@touch $@

$(SET_UP_DEV): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing into .venv, with what the tests need; only this once"
	@$(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $(SET_UP) $@

java:
	@$(BIN)/python -m penstock.spark.java >/dev/null 2>&1 || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		echo "installing Java; only this once" && apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y default-jre-headless >/dev/null; } || true
	@$(BIN)/python -m penstock.spark.java

servers: $(SET_UP_DEV)  # what single tests need; a test whose server is not there says so
	@command -v mosquitto >/dev/null || [ -x /usr/sbin/mosquitto ] || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		echo "installing Mosquitto; only this once" && apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y mosquitto >/dev/null; } || true
	@command -v strace >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		echo "installing strace; only this once" && apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y strace >/dev/null; } || true
	@$(BIN)/python -m penstock.testing.readers --is-installed || { \
		echo "installing a second DuckDB (150 MB); only this once" && $(BIN)/python -m penstock.testing.readers; } || true
	@{ command -v chromium && command -v chromedriver; } >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		echo "installing Chromium; only this once" && apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y chromium chromium-driver >/dev/null; } || true
	@$(BIN)/python -m penstock.testing.apicurio --is-installed || { \
		command -v mvn >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
			echo "installing Maven; only this once" && apt-get -qq update && \
			DEBIAN_FRONTEND=noninteractive apt-get -qq install -y maven >/dev/null; }; \
		echo "fetching Apicurio (142 MB); only this once" && $(BIN)/python -m penstock.testing.apicurio; } || true
	@$(BIN)/python -m penstock.testing.kafka --is-installed || { \
		echo "fetching Kafka (20 MB); only this once" && $(BIN)/python -m penstock.testing.kafka; } || true
	@$(BIN)/python -m penstock.testing.s3 --is-installed || { \
		echo "fetching S3 servers (150 MB); only this once" && $(BIN)/python -m penstock.testing.s3; } || true
	@$(BIN)/python -m penstock.testing.oldest_spark --is-installed || { \
		echo "fetching the oldest Spark that is supported (430 MB); only this once" && \
		$(BIN)/python -m penstock.testing.oldest_spark; } || true
	@$(BIN)/python -m penstock.testing.spark_classes --is-installed || { \
		echo "making what lets Spark start soon (160 MB); only this once" && $(BIN)/python -m penstock.testing.spark_classes; } || true
