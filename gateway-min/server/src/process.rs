//! What others may see of this process: other users, and the commands that its agents run.

/// Lets only its owner read what this process writes from now on: databases, state, exports. Stricter settings stay.
pub fn keep_files_private() {
    #[cfg(unix)]
    {
        use rustix::fs::Mode;
        let others = Mode::RWXG | Mode::RWXO;
        let before = rustix::process::umask(others);
        rustix::process::umask(before | others);
    }
}

/// Closes this process's memory and environment, which hold keys, to the commands that it will start (`bash`). On Linux
/// they could read both in `/proc`, because they run as the same user. Commands of root lose the capabilities to inspect
/// processes and to administer the system.
///
/// Call it before any other thread exists: threads that exist keep their capabilities.
pub fn close_to_commands() {
    #[cfg(target_os = "linux")]
    {
        use rustix::process::{DumpableBehavior, set_dumpable_behavior};
        use rustix::thread::{
            CapabilitySet, capability_is_in_bounding_set, remove_capability_from_bounding_set,
        };

        if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
            tracing::warn!(%error, "commands that agents run may read this process's environment");
        }
        if !rustix::process::geteuid().is_root() {
            return;
        }
        // With any of these the superuser may look into a process that is closed to others of its user.
        for capability in [CapabilitySet::SYS_PTRACE, CapabilitySet::PERFMON, CapabilitySet::SYS_ADMIN] {
            // An error means that the kernel does not know it.
            if capability_is_in_bounding_set(capability).unwrap_or(false)
                && let Err(error) = remove_capability_from_bounding_set(capability)
            {
                tracing::warn!(%error, "commands that agents run as root may read this process's environment");
            }
        }
    }
}
