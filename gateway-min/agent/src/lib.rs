#![doc = include_str!("../README.md")]

mod agent;
mod binding;
mod builder;
mod date;
pub mod duration;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
pub mod goal;
pub mod goal_state;
mod input;
mod middleware;
pub mod model;
mod observer;
mod pattern;
mod prompt;
pub mod receipts;
pub mod serialize;
mod session;
pub mod skills;
mod spans;
pub mod summary;
pub mod title;
mod tokens;
pub mod tools;

pub use agent::{Agent, END, MODEL as MODEL_NODE, NODES};
pub use binding::{AGENT_BINDING, DEFAULT_AGENT, binding};
pub use builder::{AgentBuilder, AgentSpec, SubagentSpec};
pub use date::{DATE_TIMEZONE_VARIABLE, DateZone};
pub use error::AgentError;
pub use input::{Input, Next, pending_answer};
pub use middleware::{After, Before, Middleware, View};
pub use observer::{Added, Observer, ObserverError, Origin, TaskInput};
pub use pattern::Pattern;
pub use prompt::Prompt;
pub use session::{Breakpoints, Durability, Ended, Interrupts, RunTerms, Session};
pub use spans::{TRACE_FAILED, TRACE_TARGET};
pub use tokens::Tokens;
