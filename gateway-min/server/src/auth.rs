//! Authentication, and which threads a caller sees.
//!
//! Off by default: every client is the one user, [`SINGLE_USER`], and an administrator, which is why the gateway then
//! listens on this machine only ([`reach`]). With `auth.enabled`, each request carries an API key. Keys are in one file
//! ([`KeyFile`]), as hashes; each belongs to a user, who sees their own threads and those without an owner, and has a
//! role. A role opens routes, not the threads of others.

use std::net::SocketAddr;
use std::sync::Arc;

use threadkeep_config::{Auth, KeyError, KeyFile, Role, Secret};

/// The user of a gateway without authentication.
pub const SINGLE_USER: &str = "default";

/// Who sent a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    user: Arc<str>,
    role: Role,
    sees_all: bool,
}

impl Principal {
    /// Any caller of a gateway without authentication.
    pub(crate) fn single_user() -> Self {
        Self { user: SINGLE_USER.into(), role: Role::Admin, sees_all: true }
    }

    /// The owner of what the request creates.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// The user whose threads are visible, along with those without an owner; `None` sees all.
    pub fn sees(&self) -> Option<&str> {
        (!self.sees_all).then_some(&*self.user)
    }

    /// Whether the administrator routes are allowed.
    pub fn is_admin(&self) -> bool {
        self.role == Role::Admin
    }
}

/// Which clients a gateway without authentication serves. Irrelevant with authentication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// Clients on this machine, which connect to `localhost` or an IP address.
    Local,
    /// Everyone, under any host name, if the operator allows it (`auth.allow_unauthenticated`).
    Anywhere,
}

/// Determines who sent a request.
#[derive(Debug, Clone)]
pub(crate) struct Authenticator {
    /// `None` without authentication.
    keys: Option<KeyFile>,
    reach: Reach,
}

impl Authenticator {
    pub(crate) fn new(settings: &Auth) -> Self {
        Self {
            keys: settings.enabled.then(|| KeyFile::new(&settings.keys_file)),
            reach: if settings.allow_unauthenticated { Reach::Anywhere } else { Reach::Local },
        }
    }

    pub(crate) fn reach(&self) -> Reach {
        self.reach
    }

    pub(crate) fn is_on(&self) -> bool {
        self.keys.is_some()
    }

    /// The principal of a request with this key; `None` if it is refused.
    ///
    /// # Errors
    /// [`KeyError`] if the keys cannot be read: then every request is refused.
    pub(crate) async fn authenticate(&self, key: Option<Secret>) -> Result<Option<Principal>, KeyError> {
        let Some(file) = &self.keys else { return Ok(Some(Principal::single_user())) };
        let Some(key) = key else { return Ok(None) };
        let record = file.find_async(key).await?;
        Ok(record.map(|record| Principal { user: record.user.into(), role: record.role, sees_all: false }))
    }
}

/// A gateway without authentication would listen beyond this machine.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "will not listen on {0} without authentication: every client that reaches the port would be an administrator. \
     Set auth.enabled: true and create a key with `threadkeep keys create`; or listen on 127.0.0.1; or accept it with \
     --allow-unauthenticated or auth.allow_unauthenticated: true"
)]
pub struct Exposed(pub SocketAddr);

/// Which clients a gateway that listens on `address` serves. `accepted` means that the operator agreed on the command
/// line to serve everyone; the configuration can do the same.
///
/// # Errors
/// [`Exposed`] if it would serve everyone without authentication and without the operator's agreement.
pub fn reach(address: SocketAddr, settings: &Auth, accepted: bool) -> Result<Reach, Exposed> {
    if accepted || settings.allow_unauthenticated {
        return Ok(Reach::Anywhere);
    }
    if settings.enabled || address.ip().is_loopback() { Ok(Reach::Local) } else { Err(Exposed(address)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_authentication_only_this_machine_is_listened_to_unless_the_operator_says_so() {
        let settings = |enabled, allow_unauthenticated| Auth {
            enabled,
            allow_unauthenticated,
            ..Auth::at("/nowhere".as_ref())
        };
        for (address, local) in [
            ("127.0.0.1:1", true),
            ("127.9.9.9:1", true),
            ("[::1]:1", true),
            ("0.0.0.0:1", false),
            ("[::]:1", false),
            ("10.0.0.1:1", false),
            ("[::ffff:127.0.0.1]:1", false),
        ] {
            let address: SocketAddr = address.parse().unwrap();
            let expected = if local { Ok(Reach::Local) } else { Err(Exposed(address)) };
            assert_eq!(reach(address, &settings(false, false), false), expected);
            assert_eq!(reach(address, &settings(true, false), false), Ok(Reach::Local));
            assert_eq!(reach(address, &settings(false, true), false), Ok(Reach::Anywhere));
            assert_eq!(reach(address, &settings(false, false), true), Ok(Reach::Anywhere));
        }
        let said = Exposed("0.0.0.0:8001".parse().unwrap()).to_string();
        for part in ["0.0.0.0:8001", "--allow-unauthenticated", "auth.allow_unauthenticated", "auth.enabled"]
        {
            assert!(said.contains(part), "{said}");
        }
    }

    #[tokio::test]
    async fn without_authentication_everybody_is_the_one_user() {
        let off = Authenticator::new(&Auth::at("/nowhere".as_ref()));
        let principal = off.authenticate(Some(Secret::new("whatever"))).await.unwrap().unwrap();
        assert_eq!((principal.user(), principal.sees(), principal.is_admin()), ("default", None, true));
    }

    #[tokio::test]
    async fn a_key_stands_for_its_user_and_role() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Auth { enabled: true, ..Auth::at(dir.path()) };
        let file = KeyFile::new(&settings.keys_file);
        let on = Authenticator::new(&settings);
        assert_eq!(on.authenticate(None).await.unwrap(), None);
        let mut last = None;
        for (role, admin) in [(Role::User, false), (Role::Admin, true)] {
            let (_, key) = file.create("ann", role).unwrap();
            last = Some(key.clone());
            let found = on.authenticate(Some(key)).await.unwrap().unwrap();
            assert_eq!((found.user(), found.sees(), found.is_admin()), ("ann", Some("ann"), admin));
        }
        std::fs::write(&settings.keys_file, "{").unwrap();
        assert!(on.authenticate(last).await.is_err(), "a broken file refuses every request");
        assert_eq!(on.authenticate(None).await.unwrap(), None);
    }
}
