//! The HTTP surface, in process: threads, state, history, events, models, and the OpenAPI document.

// Helpers are test code too, but the lint does not know it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod api;
mod auth;
mod batches;
mod branches;
mod client;
mod client_delegation;
mod compact;
mod degraded;
mod delegation;
mod delegation_edited;
mod delegation_stopped;
mod delete;
mod dropped_requests;
mod events;
mod fields;
mod forged;
mod full_disk;
mod gate;
mod goal;
#[allow(dead_code, reason = "the commands' tests use all of it")]
#[path = "../support/graph.rs"]
mod graph;
mod history;
mod history_cache;
mod langgraph;
mod limits;
mod lost_history;
mod metrics;
mod page;
mod page_batches;
mod page_checkpoints;
mod page_delegation;
mod page_list;
mod page_long;
mod page_overview;
mod page_session;
mod page_waiting;
mod protocol;
mod protocol_commands;
mod reload;
mod replay;
mod retention;
mod run_cancel;
mod run_checks;
mod run_control;
mod run_edit;
mod run_events;
mod run_from;
mod run_gate;
mod run_goal;
mod run_idempotency;
mod run_queue;
mod run_results;
mod run_resume;
mod run_stream;
mod run_workspace;
mod runs;
mod sdk_calls;
mod search;
mod several;
mod several_balanced;
mod several_streams;
mod sse;
mod state;
mod subagents;
mod subgraphs;
mod summarization;
#[path = "../support/mod.rs"]
mod support;
mod threads;
