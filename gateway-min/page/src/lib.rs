#![doc = include_str!("../README.md")]

mod assets;
mod batches;
mod checkpoints;
mod conversation;
mod executions;
mod forms;
mod goal;
mod health;
mod layout;
mod overview;
mod runs;
mod storage;
mod text;
mod threads;
mod tree;
mod waiting;

pub use assets::{SCRIPT, SCRIPT_PATH, STYLE, STYLE_PATH};
pub use batches::{Batch, BatchLine, ItemLine};
pub use checkpoints::{Change, Channel, CheckpointLine, Checkpoints, Difference, State};
pub use conversation::{Call, CallState, Conversation, Message};
pub use executions::{Delegation, Execution, Step};
pub use forms::{Deletion, problem, sign_in};
pub use goal::{Goal, GoalPanel};
pub use health::{ErrorLine, Figure, Health, figures};
pub use layout::{Place, Session, Tab, ThreadHead};
pub use overview::{Overview, ThreadRun};
pub use runs::{EventLine, RunEvents, RunLine, Runs};
pub use storage::{Plan, Share, Storage};
pub use text::{Excerpt, bytes, count, seconds, things};
pub use threads::{ThreadLine, ThreadList};
pub use tree::Node;
pub use waiting::{Question, Waiting};
