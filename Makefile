.DEFAULT_GOAL := help
# Unoptimized: it checks in five seconds, and is built in half the time.
INSTALL_DENY := CARGO_PROFILE_DEV_DEBUG=0 cargo install --locked --debug cargo-deny@0.20.2
.PHONY: help run config-upgrade test suites page-test pictures python-test langgraph-tests wheel bench-python lint advisories docs sdk-check tools-check openapi-check tour conformance new-saver fuzz torture patroni crash-check size-report bench bench-peers bench-targets bench-criterion load scale instructions batches-torture chaos

help: ## Show what there is to run
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: ## Serve the gateway on http://127.0.0.1:8001, with its page for browsers and an embedded SQLite; needs no configuration
	cargo run --release --locked -p threadkeep-gateway -- serve

config-upgrade: ## Add what is new to the configuration file (CONFIG, else SVC_CONFIG_PATH, else config.yaml), with a backup
	cargo run --release --locked -p threadkeep-gateway -- config upgrade $(if $(CONFIG),--config $(CONFIG))

test: ## Run every test, the SDK clients and the tour included; a line a step, the rest in target/test-logs; BUSY=4: beside four busy loops; ROUNDS=3: three times
	@scripts/test.sh $(if $(BUSY),--busy $(BUSY)) $(if $(ROUNDS),--rounds $(ROUNDS))

suites: ## The conformance suites and the tests of the drivers, ROUNDS (20) times beside BUSY (4) busy loops
	@scripts/test.sh --suites --rounds $(or $(ROUNDS),20) --busy $(or $(BUSY),4)

page-test: ## The page in Chromium, against the gateway itself; ARGS name tests
	scripts/named.sh test --locked -p threadkeep-gateway --test page -- $(ARGS)

pictures: ## Pictures of every place of the page, in target/pictures, and how soon each is painted; ARGS (--docs: the README's too)
	cargo build -q --release --locked -p threadkeep-gateway --bin threadkeep
	python3 scripts/pictures.py $(ARGS)

python-test: ## The Python package from its wheel in an empty environment, with LangGraph's conformance suite; ARGS go to pytest; FREE_THREADED=3.14t: with that interpreter
	FREE_THREADED=$(FREE_THREADED) scripts/python-test.sh $(ARGS)

langgraph-tests: ## LangGraph's own tests of savers and graphs, from PyPI, on our savers; STORES ("sqlite postgres"); ARGS go to pytest
	STORES="$(STORES)" scripts/python-test.sh --langgraph $(ARGS)

wheel: ## The wheel of the Python package, optimized, in target/wheels; then used in an empty environment (PYTHON: its interpreter); FREE_THREADED=3.14t, one more for that
	FREE_THREADED=$(FREE_THREADED) scripts/python-test.sh --wheel
	scripts/wheel-check.sh

bench-python: ## LangGraph's savers and ours through a real graph, in one run; TURNS (500)
	scripts/bench-python.sh --turns $(or $(TURNS),500)

lint: ## Formatting, lints, licences; advisories if their database is on this machine
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	cargo clippy -p threadkeep-testing --all-targets --features containers --locked -- -D warnings
	command -v cargo-deny > /dev/null || $(INSTALL_DENY)
	cargo deny check licenses bans sources
	@if ls $${CARGO_HOME:-$$HOME/.cargo}/advisory-db*/* > /dev/null 2>&1; then cargo deny --offline check advisories; \
	else echo "advisories were not checked: make advisories fetches their database from github.com"; fi

advisories: ## Known vulnerabilities of the dependencies, with the newest database from github.com
	command -v cargo-deny > /dev/null || $(INSTALL_DENY)
	cargo deny check advisories

docs: ## Build the API documentation
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --locked

sdk-check: ## The official Python and JavaScript SDKs, unmodified, and useStream in React, against live gateways in both modes, without and with keys
	scripts/with-gateway.sh full  scripts/sdk-check.sh
	scripts/with-gateway.sh delta scripts/sdk-check.sh
	scripts/with-gateway.sh full  scripts/sdk-check-js.sh
	scripts/with-gateway.sh delta scripts/sdk-check-js.sh
	MODE=full SCRIPT=scripts/sdk_react.json scripts/with-gateway.sh full scripts/sdk-check-react.sh
	MODE=delta SCRIPT=scripts/sdk_react.json scripts/with-gateway.sh delta scripts/sdk-check-react.sh
	PAGE=sdk_protocol MODE=full SCRIPT=scripts/sdk_protocol.json scripts/with-gateway.sh full scripts/sdk-check-react.sh
	PAGE=sdk_protocol MODE=delta SCRIPT=scripts/sdk_protocol.json scripts/with-gateway.sh delta scripts/sdk-check-react.sh
	WITH_KEYS=1 scripts/with-gateway.sh delta scripts/sdk-check.sh
	scripts/with-gateway.sh full  scripts/sdk-fields.sh

tools-check: ## External agents and MCP servers of others, from npm, against the built binary; needs no keys
	scripts/tools-check.sh

openapi-check: ## Requests made from the gateway's OpenAPI document, valid and invalid; EXAMPLES (10) of each operation
	scripts/with-gateway.sh full scripts/openapi-check.sh

tour: ## The README's tour against a live gateway in both modes
	scripts/with-gateway.sh full  scripts/tour.sh
	scripts/with-gateway.sh delta scripts/tour.sh

conformance: ## The conformance suite on SAVER (sqlite), with SEED and PROGRAMS if given; prints a report
	cargo run --locked -p threadkeep-conformance -- --saver $(or $(SAVER),sqlite) $(if $(SEED),--seed $(SEED)) $(if $(PROGRAMS),--programs $(PROGRAMS))

new-saver: ## The crate of a saver over the store NAME, in DIR (../threadkeep-NAME): it compiles, and its tests say what to write
	scripts/new-saver.sh "$(NAME)" $(if $(DIR),"$(DIR)")

fuzz: ## Fuzz each decoder, and whole programs of calls, for SECONDS (60) each; TARGETS names some of them
	FUZZ_SECONDS=$(or $(SECONDS),60) scripts/fuzz.sh $(TARGETS)

torture: ## Try to lose or damage what was acknowledged, for MINUTES (10) or until each exercise had a turn; SEED, ONLY (a name), TURNS, EFFORT (2), OUT (a file); see docs/torture.md
	cargo run --release --locked -p threadkeep-torture -- --minutes $(or $(MINUTES),10) --effort $(or $(EFFORT),2) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only "$(ONLY)") $(if $(TURNS),--turns $(TURNS)) $(if $(OUT),--out $(OUT))

batches-torture: ## A batch of ITEMS (5000) on three processes, KILLS (100) of them, and CRASHES (5) of the database; see docs/torture.md
	BATCH_ITEMS=$(or $(ITEMS),5000) BATCH_KILLS=$(or $(KILLS),100) BATCH_CRASHES=$(or $(CRASHES),5) \
	  scripts/named.sh test --locked -p threadkeep-gateway --test process -- s62_a_batch_outlives --nocapture

chaos: ## Gateways while processes and servers fail, for MINUTES (10), with SEED; what was acknowledged must be there; ONLY (three_gateways, two_gateways); see docs/torture.md
	CHAOS_SECONDS=$$(($(or $(MINUTES),10) * $(if $(ONLY),60,30))) $(if $(SEED),CHAOS_SEED=$(SEED)) \
	  scripts/named.sh test --locked -p threadkeep-gateway --test process -- chaos::$(ONLY) --nocapture --test-threads 1

patroni: ## Crashes, switchovers and lost machines under Patroni, with two gateways and streaming clients; ROUNDS (1); see docs/failover.md
	scripts/patroni.py $(ROUNDS)

size-report: ## File bytes and time per turn after 200 and 2,000 turns, in both modes
	cargo run --release --locked -p threadkeep-benches --bin size_report

bench: ## The workloads in the short form, under five minutes: tables, rows and plots in target/bench/short
	scripts/bench.sh short

bench-peers: ## The same operations on our savers, LangGraph's and raw stores, alternating; installs LangGraph privately
	scripts/bench.sh peers

bench-targets: ## The workloads at full size, 2,000 turns in every mode; about a quarter of an hour
	scripts/bench.sh targets

bench-criterion: ## Each engine step and each driver operation; FILTER names some
	scripts/named.sh bench --locked -p threadkeep-benches -- $(FILTER)

load: ## Turns per second, latency and CPU of a gateway with 1 and 64 threads, beside LangGraph's server; ARGS="--turns 100" for more
	scripts/load.sh $(ARGS)

scale: ## Operator commands and routes on THREADS (10000) threads with long ones of TURNS (5000); turns beside commands; OUT, a file in Markdown; ARGS
	scripts/scale.sh $(if $(THREADS),--threads $(THREADS)) $(if $(TURNS),--turns $(TURNS)) $(if $(OUT),--out $(OUT)) $(ARGS)

instructions: ## Instructions of the hot paths against benches/instructions.json; UPDATE=1 writes that file, BOUND=50 allows 50 %
	scripts/instructions.sh $(if $(UPDATE),--update) $(if $(BOUND),--bound $(BOUND))
