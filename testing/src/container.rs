//! Servers in containers, for machines where their programs are neither installed nor can be. With the feature `containers`, which
//! brings testcontainers; CI compiles and lints it, and runs none, since it has no container engine.

#[cfg(feature = "containers")]
mod engine;

#[cfg(feature = "containers")]
pub(crate) use engine::Container;

use crate::{BoxError, Result};

/// What runs in a container.
#[cfg_attr(not(feature = "containers"), expect(dead_code, reason = "read by the feature `containers`"))]
pub(crate) struct Image<'a> {
    pub(crate) name: &'a str,
    pub(crate) tag: &'a str,
    /// The port that the server listens on inside, and the one of the loopback interface that leads there.
    pub(crate) ports: (u16, u16),
    pub(crate) environment: &'a [(&'a str, &'a str)],
    /// For the server.
    pub(crate) arguments: &'a [&'a str],
}

/// No container: the feature is off.
#[cfg(not(feature = "containers"))]
pub(crate) enum Container {}

#[cfg(not(feature = "containers"))]
impl Image<'_> {
    /// No container can be started.
    ///
    /// # Errors
    /// `missing`, which says what is not installed, and what else would do.
    pub(crate) fn start(&self, missing: BoxError, _ready: impl FnMut() -> bool) -> Result<Container> {
        let Self { name, tag, .. } = self;
        let how = "with Docker here, --features threadkeep-testing/containers runs";
        Err(format!("{missing}; or, {how} {name}:{tag}").into())
    }
}

#[cfg(feature = "containers")]
impl Image<'_> {
    /// Starts a container and waits until its server answers. It ends with the handle, and with this process.
    ///
    /// # Errors
    /// `missing`, which says what is not installed, with why no container can be started; what the container printed, if its server
    /// does not answer.
    pub(crate) fn start(&self, missing: BoxError, ready: impl FnMut() -> bool) -> Result<Container> {
        let container = Container::start(self)
            .map_err(|error| format!("{missing}; nor does it run in a container: {error}"))?;
        container.wait(ready)?;
        Ok(container)
    }
}
