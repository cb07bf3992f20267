//! The lead agent: a loop of model call and parallel tool calls, one superstep each. Everything else that it does
//! (titles, loop detection, repair of dangling tool calls) happens inside those supersteps and costs no checkpoint.

mod binding;
mod builder;
pub mod duration;
mod error;
pub mod goal;
pub mod goal_state;
mod lead;
mod observer;
mod prompt;
mod session;
pub(crate) mod spans;
pub mod summary;
pub mod title;
mod tokens;

pub use binding::{AGENT_BINDING, DEFAULT_AGENT, binding};
pub use builder::{AgentBuilder, AgentSpec};
pub use error::AgentError;
pub use lead::{LeadAgent, MODEL as MODEL_NODE};
pub use observer::{Added, Observer, ObserverError, Origin, TaskInput};
pub use session::{Breakpoints, Ended, Interrupts, RunTerms, Session};
pub use spans::{TRACE_FAILED, TRACE_TARGET};
pub use tokens::Tokens;
