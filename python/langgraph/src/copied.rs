//! Copies of checkpoints: `update_state(config, None, as_node="__copy__")`.

use serde_json::Value as Json;
use threadkeep::Result;
use threadkeep::id::ChannelName;
use threadkeep::saver::{ListQuery, Load};

use crate::frame::FRAME;
use crate::known::Known;
use crate::runs::Rows;
use crate::store::LangGraph;
use crate::types::Put;

/// Checkpoints that are looked at in one read.
const PAGE: usize = 64;

impl LangGraph {
    /// What a copy of a checkpoint applies: what that one applied; `None` if the put is no copy.
    ///
    /// LangGraph puts a copy on the parent of what it copies and does not say what that is. The labels do: a step draws
    /// new ones for what it changes, so other children of the parent have others. A run that goes back also puts a
    /// checkpoint that changes nothing, but with the labels of its parent.
    ///
    /// # Errors
    /// The saver's.
    pub(crate) async fn copied(&self, put: &Put, parent: Option<&Known>) -> Result<Option<Rows>> {
        let is_fork = put.metadata.get("source").and_then(Json::as_str) == Some("fork");
        let (Some(id), Some(parent)) = (put.parent, parent) else { return Ok(None) };
        if !is_fork || !put.new.is_empty() || parent.has_labels(&put.versions) {
            return Ok(None);
        }
        let mut query = ListQuery {
            namespace: Some(put.place.namespace.clone()),
            limit: Some(PAGE),
            load: Load::Only([FRAME].into_iter().map(ChannelName::from).collect()),
            ..ListQuery::new(&put.place.thread)
        };
        loop {
            let page = self.saver.list(&query).await?;
            for tuple in &page {
                // Children are newer than their parent.
                if tuple.checkpoint.id <= id {
                    return Ok(None);
                }
                if tuple.parent == Some(id) && Known::new(tuple)?.has_labels(&put.versions) {
                    return Ok(Some(Rows::only(&tuple.checkpoint.applied)));
                }
            }
            if page.len() < PAGE {
                return Ok(None);
            }
            query.before = page.last().map(|tuple| tuple.checkpoint.id);
        }
    }
}
