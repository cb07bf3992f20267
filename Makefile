.PHONY: test
test: ## Run every test
	cargo test --workspace --locked
