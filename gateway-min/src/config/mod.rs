//! The gateway's configuration: one YAML file, found, completed from the environment and validated.
//!
//! [`Config::load`] runs these steps: settle the project root and read its `.env`, find the file, parse it,
//! compare its version with the example file's, replace `$VAR`, carry deprecated keys forward, and build the
//! typed sections. All problems of a file are reported at once, each under its dotted key path. No file at
//! all means the built-in defaults. Nothing here reads or changes the environment of the process, except
//! [`LoadOptions::from_process`].
//!
//! [`ConfigHandle`] follows the file while the gateway runs. Some sections are read once, at start, and a
//! later edit counts after a restart only: `database` (save `checkpoint_graph_cache`), `run_events`,
//! `stream_bridge`, `run_ownership`, `agent_storage`, `sandbox`, `subagent_runtime` and `subagent_batches`.
//! Whoever builds something from them keeps what it was given. The others are read anew for each run:
//! `models`, `tools`, `tool_groups`, `subagents`, `acp_agents`, `summarization`, `title`, `loop_detection`,
//! `token_usage`, `token_budget`, `tool_search`, `verification`, `max_recursion_limit`.

mod environment;
mod error;
mod interpolate;
mod models;
mod node;
mod secret;
mod sections;
mod version;
mod yaml;
