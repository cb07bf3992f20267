//! Servers in containers, for machines where their programs are neither installed nor installable: Docker or Podman,
//! whichever is available.

use std::path::PathBuf;

use crate::Result;
use crate::supervisor::Supervisor;
use crate::tools::{User, look_up};

/// Stops a server cleanly; the engine forwards it and removes the container.
const STOP: &str = "TERM";

/// What to run in a container.
pub(crate) struct Image<'a> {
    pub(crate) name: &'a str,
    /// The port the server listens on inside, and the loopback port forwarded to it.
    pub(crate) ports: (u16, u16),
    pub(crate) environment: &'a [(&'a str, &'a str)],
    /// Arguments for the server.
    pub(crate) arguments: &'a [&'a str],
}

impl Image<'_> {
    /// Starts the container with the available engine and waits until it answers. It ends with the handle.
    ///
    /// # Errors
    /// `missing`, which says what to install, if there is no engine; the container's output if it does not answer.
    pub(crate) fn start(&self, missing: crate::BoxError, ready: impl FnMut() -> bool) -> Result<Supervisor> {
        let Some(engine) = engine() else {
            return Err(format!("{missing}; a container engine (docker or podman) would do as well").into());
        };
        let user = User::ourselves();
        let arguments = self.arguments();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let supervisor = Supervisor::new(user, user.directory()?, STOP, &engine, &arguments)?;
        supervisor.start(ready)?;
        Ok(supervisor)
    }

    /// Runs in the foreground, so that the supervisor sees the container end, and keeps nothing afterwards.
    fn arguments(&self) -> Vec<String> {
        let (inside, outside) = self.ports;
        let mut arguments: Vec<String> =
            ["run", "--rm", "--publish"].map(str::to_owned).into_iter().collect();
        arguments.push(format!("127.0.0.1:{outside}:{inside}"));
        for (name, value) in self.environment {
            arguments.extend(["--env".to_owned(), format!("{name}={value}")]);
        }
        arguments.push(self.name.to_owned());
        arguments.extend(self.arguments.iter().map(|argument| (*argument).to_owned()));
        arguments
    }
}

fn engine() -> Option<PathBuf> {
    look_up("docker").or_else(|| look_up("podman"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_is_reached_on_the_loopback_interface_alone_and_leaves_nothing() {
        let image = Image {
            name: "postgres:17",
            ports: (5432, 40_001),
            environment: &[("POSTGRES_USER", "somebody")],
            arguments: &["-c", "fsync=off"],
        };
        let expected =
            "run --rm --publish 127.0.0.1:40001:5432 --env POSTGRES_USER=somebody postgres:17 -c fsync=off";
        assert_eq!(image.arguments().join(" "), expected);
    }
}
