//! The servers of a process.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use futures::future::join_all;
use threadkeep_agent::tools::{Tool, ToolSource};
use threadkeep_config::{Config, McpServer};
use threadkeep_processes::Guard;

use crate::server::Server;
use crate::tool::McpTool;

/// The servers that the configuration names, each with at most one connection.
pub struct McpServers {
    guard: Guard,
    servers: Mutex<BTreeMap<String, Arc<Server>>>,
}

impl McpServers {
    /// No servers yet. Those that are programs run under `guard`.
    pub fn new(guard: Guard) -> Self {
        Self { guard, servers: Mutex::default() }
    }

    /// Begins to connect to the configured servers, and lets go of all others. Returns at once.
    pub fn connect(&self, configured: &BTreeMap<String, McpServer>) {
        for server in self.follow(configured) {
            server.connect();
        }
    }

    /// The tools of the configured servers that are available. Servers that are connected to for the first time are waited
    /// for, a few seconds at most.
    pub async fn tools(&self, configured: &BTreeMap<String, McpServer>) -> Vec<Arc<dyn Tool>> {
        let servers = self.follow(configured);
        let of_each = join_all(servers.iter().map(|server| async move {
            let tools = server.tools().await.into_iter();
            tools
                .map(|tool| Arc::new(McpTool::new(Arc::clone(server), tool)) as Arc<dyn Tool>)
                .collect::<Vec<_>>()
        }));
        of_each.await.into_iter().flatten().collect()
    }

    /// The servers as configured now. One whose configuration has changed is another one.
    fn follow(&self, configured: &BTreeMap<String, McpServer>) -> Vec<Arc<Server>> {
        let mut servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
        servers.retain(|name, server| configured.get(name).is_some_and(|config| *config == server.config));
        let enabled = configured.iter().filter(|(_, config)| config.enabled);
        let followed = enabled.map(|(name, config)| {
            let new = || Server::new(name, config.clone(), self.guard.clone());
            Arc::clone(servers.entry(name.clone()).or_insert_with(new))
        });
        followed.collect()
    }
}

#[async_trait]
impl ToolSource for McpServers {
    async fn tools(&self, config: &Config) -> Vec<Arc<dyn Tool>> {
        Self::tools(self, &config.mcp_servers).await
    }
}
