//! The subagents that one run may delegate to.

use std::sync::Arc;

use super::builtin::BASH;
use super::definition::Definition;

/// The subagents that a run may delegate to, in the order in which they are offered.
#[derive(Debug, Clone)]
pub struct Available {
    definitions: Vec<Arc<Definition>>,
    /// Whether `bash` is missing because commands on this machine are not allowed.
    bash_is_disabled: bool,
    allowlist: Allowlist,
}

/// Whether a list limits what a run may delegate to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Allowlist {
    Absent,
    Empty,
    Present,
}

/// Why a subagent cannot be used. The lead agent reads the text (service reference, "Subagent settings", and the
/// allowlist of "Request context keys (runs)").
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// `bash`, and the configuration does not allow commands on this machine.
    #[error(
        "The subagent 'bash' is disabled for the local sandbox, because running commands directly on the host is not a \
         secure boundary. Use an isolated sandbox provider, or set sandbox.allow_host_bash: true if every user of this \
         environment is trusted."
    )]
    BashDisabled,
    /// There is no such subagent, or the run may not use it.
    #[error("Unknown subagent type '{name}'. Available: {available}")]
    Unknown {
        /// The name that was asked for.
        name: String,
        /// The names that there are, or a text that says that there is none.
        available: String,
    },
}

impl Available {
    /// All of `definitions` that `allowed` names (`None` names all), without `bash` if `host_bash` is off.
    pub(super) fn new(definitions: Vec<Definition>, allowed: Option<&[String]>, host_bash: bool) -> Self {
        let is_allowed = |name: &str| allowed.is_none_or(|list| list.iter().any(|allowed| allowed == name));
        let offered = definitions
            .into_iter()
            .filter(|definition| is_allowed(&definition.name) && (host_bash || definition.name != BASH));
        Self {
            definitions: offered.map(Arc::new).collect(),
            bash_is_disabled: !host_bash,
            allowlist: match allowed {
                None => Allowlist::Absent,
                Some([]) => Allowlist::Empty,
                Some(_) => Allowlist::Present,
            },
        }
    }

    /// Whether the run has delegation tools at all: an empty allowlist switches them off.
    pub fn offers_delegation(&self) -> bool {
        self.allowlist != Allowlist::Empty
    }

    /// The subagents, in the order in which they are offered.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Definition>> {
        self.definitions.iter()
    }

    /// Their names, separated by `, `; `none permitted by caller policy` or `none` if there is none.
    pub fn names(&self) -> String {
        if self.definitions.is_empty() {
            let limited = self.allowlist != Allowlist::Absent;
            return if limited { "none permitted by caller policy" } else { "none" }.to_owned();
        }
        let names: Vec<&str> = self.definitions.iter().map(|definition| definition.name.as_str()).collect();
        names.join(", ")
    }

    /// The subagent with this name.
    ///
    /// # Errors
    /// [`Unavailable`]. The advice about `bash` comes first, so that it is also given where an allowlist excludes it.
    pub fn get(&self, name: &str) -> Result<&Arc<Definition>, Unavailable> {
        if name == BASH && self.bash_is_disabled {
            return Err(Unavailable::BashDisabled);
        }
        let found = self.definitions.iter().find(|definition| definition.name == name);
        found.ok_or_else(|| Unavailable::Unknown { name: name.to_owned(), available: self.names() })
    }
}
