//! Containers by testcontainers, which talks to Docker or to what looks like it (`DOCKER_HOST`).

use std::sync::{Mutex, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use testcontainers::core::ContainerPort;
use testcontainers::runners::SyncRunner as _;
use testcontainers::{ContainerRequest, GenericImage, ImageExt as _};

use super::Image;
use crate::{BoxError, Result};

/// How long a server may take until it answers; pulling its image comes before.
const PATIENCE: Duration = Duration::from_mins(10);
/// Between two looks whether it does.
const PAUSE: Duration = Duration::from_millis(50);

type Running = testcontainers::Container<GenericImage>;

/// The containers that run, so that the end of the process finds those whose handles are in statics: these are never dropped. After a
/// signal, the watchdog of testcontainers removes them.
static RUNNING: Mutex<Vec<Running>> = Mutex::new(Vec::new());

/// A container; removed with this handle, and with this process unless that is killed.
pub(crate) struct Container {
    id: String,
}

impl Container {
    pub(super) fn start(image: &Image<'_>) -> Result<Self> {
        static AT_THE_END: Once = Once::new();
        AT_THE_END.call_once(|| {
            shutdown_hooks::add_shutdown_hook(remove_all);
        });
        let request = request(image);
        // Callers may be in a runtime, in which testcontainers cannot wait.
        let starting = thread::spawn(|| request.start());
        let container = starting.join().map_err(|_| "testcontainers panicked")??;
        let id = container.id().to_owned();
        RUNNING.lock().unwrap_or_else(PoisonError::into_inner).push(container);
        Ok(Self { id })
    }

    pub(super) fn wait(&self, mut ready: impl FnMut() -> bool) -> Result<()> {
        let started = Instant::now();
        while !ready() {
            if started.elapsed() > PATIENCE {
                return Err(format!(
                    "the server in the container does not answer; it printed:\n{}",
                    self.log()
                )
                .into());
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn log(&self) -> String {
        let Some(container) = self.take() else { return String::new() };
        let reading = thread::spawn(move || -> Result<Vec<u8>, BoxError> {
            Ok([container.stdout_to_vec()?, container.stderr_to_vec()?].concat())
        });
        let log = reading.join().ok().and_then(Result::ok).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    fn take(&self) -> Option<Running> {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let at = running.iter().position(|container| container.id() == self.id)?;
        Some(running.swap_remove(at))
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if let Some(container) = self.take() {
            remove(vec![container]);
        }
    }
}

/// Removes containers, on a thread of its own: testcontainers waits for it, which a runtime does not allow.
fn remove(containers: Vec<Running>) {
    let _whether_or_not_it_panicked = thread::spawn(move || drop(containers)).join();
}

extern "C" fn remove_all() {
    remove(std::mem::take(&mut *RUNNING.lock().unwrap_or_else(PoisonError::into_inner)));
}

/// The image as testcontainers wants it. The server is reached on the loopback interface alone.
fn request(image: &Image<'_>) -> ContainerRequest<GenericImage> {
    let (inside, outside) = image.ports;
    let request = GenericImage::new(image.name, image.tag)
        .with_cmd(image.arguments.iter().copied())
        .with_mapped_port(outside, ContainerPort::Tcp(inside))
        .with_host_config_modifier(|config| {
            let ports = config.port_bindings.iter_mut().flat_map(|ports| ports.values_mut());
            for binding in ports.flatten().flatten() {
                binding.host_ip = Some("127.0.0.1".to_owned());
            }
        });
    image.environment.iter().fold(request, |request, (name, value)| request.with_env_var(*name, *value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_becomes_a_request_with_its_port_environment_and_arguments() {
        let image = Image {
            name: "postgres",
            tag: "17",
            ports: (5432, 20_001),
            environment: &[("POSTGRES_USER", "somebody")],
            arguments: &["-c", "fsync=off"],
        };
        let request = request(&image);
        let ports = request.ports().unwrap();
        assert_eq!(ports.len(), 1);
        assert_eq!((ports[0].host_port(), ports[0].container_port()), (20_001, ContainerPort::Tcp(5432)));
        let environment: Vec<_> = request.env_vars().collect();
        assert_eq!(environment.len(), 1);
        assert_eq!((environment[0].0.as_ref(), environment[0].1.as_ref()), ("POSTGRES_USER", "somebody"));
        assert_eq!(request.cmd().collect::<Vec<_>>(), ["-c", "fsync=off"]);
    }

    /// Without an engine the error says what is missing and why no container helps; with one, it is the server that runs.
    #[test]
    fn a_server_in_a_container_answers_or_the_error_says_what_to_install() {
        let missing = || -> BoxError { "redis-server is missing: install redis-server".into() };
        let reserved = crate::tools::free_port().unwrap();
        let port = reserved.number;
        let image = Image { name: "redis", tag: "7", ports: (6379, port), environment: &[], arguments: &[] };
        let answers = || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok();
        match image.start(missing(), answers) {
            Ok(container) => {
                drop(container);
                assert!(!answers(), "the container ended with its handle");
            }
            Err(error) => {
                assert!(error.to_string().starts_with(&missing().to_string()), "{error}");
            }
        }
    }
}
