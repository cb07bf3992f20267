//! The connection settings of a database.

use std::error::Error as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use threadkeep::{Error, Result};
use tokio::sync::mpsc::UnboundedSender;
use tokio_postgres::config::TargetSessionAttrs;
use tokio_postgres::{Client, Notification};
use tokio_util::task::AbortOnDropHandle;

use crate::address::{named, split_root_certificate};
use crate::connect::{Connector, servers};
use crate::session::is_own;
use crate::tls::Tls;

/// The settings of a [`crate::PostgresSaver`].
#[derive(Debug, Clone)]
pub struct Options {
    /// The schema that the tables are in. Default: `public`.
    pub schema: String,
    /// The maximum number of connections. At least 2; default 16. Each statement and each transaction takes one while it is
    /// under way. The usual commits, of however many threads, share statements, of which mostly two are under way.
    pub connections: usize,
    /// How long an operation waits for a connection, and retries after the server went away, before it fails with
    /// [`Error::Unavailable`] or [`Error::InDoubt`]. Default: 10 seconds; zero tries once.
    pub patience: Duration,
    /// Whether it is for an operator's command. The name of its sessions (`application_name`) ends with ` command` then, and
    /// [`crate::PostgresSaver::is_serving`] does not count them. Default: false.
    pub is_command: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            schema: "public".to_owned(),
            connections: 16,
            patience: Duration::from_secs(10),
            is_command: false,
        }
    }
}

impl Options {
    /// Options that wait as long as tests on a busy machine need.
    #[cfg(test)]
    pub(crate) fn patient() -> Self {
        Self { patience: Duration::from_mins(10), ..Self::default() }
    }

    /// The schema, quoted for statements.
    pub(crate) fn quoted_schema(&self) -> Result<String> {
        let fits = (1..=63).contains(&self.schema.len()) && !self.schema.contains('\0');
        if fits {
            Ok(format!("\"{}\"", self.schema.replace('"', "\"\"")))
        } else {
            Err(Error::InvalidInput(format!("{:?} cannot be the name of a schema", self.schema)))
        }
    }
}

/// The end of the name of a command's sessions.
pub(crate) const COMMAND: &str = " command";
/// The bytes of the longest name of a session.
const LONGEST_NAME: usize = 63;

/// A parsed database address, for other clients of the same database. It holds the password.
pub struct Address {
    /// The servers, the database and the role.
    pub config: tokio_postgres::Config,
    /// The file with the certificates to trust for the server; none means those of the system.
    pub root_certificates: Option<PathBuf>,
}

/// A connection, the task that drives it, and whether it has a session of the server to itself: a pooler may give each of its
/// transactions another one. The task, dropped, closes the connection at once.
pub type Connected = (Client, AbortOnDropHandle<()>, bool);

/// Opens a connection to the primary as the saver does; the sender receives what it hears after a `LISTEN`.
pub type Opener = Arc<
    dyn Fn(
            Option<UnboundedSender<Notification>>,
        ) -> BoxFuture<'static, Result<Connected, tokio_postgres::Error>>
        + Send
        + Sync,
>;

impl Address {
    /// Parses a URL or a `key=value` text, as for [`crate::PostgresSaver::connect`].
    ///
    /// # Errors
    /// [`Error::InvalidInput`]. The error repeats nothing of the address but the name of a parameter.
    pub fn parse(address: &str) -> Result<Self> {
        let (address, root_certificates) = split_root_certificate(address);
        let mut config: tokio_postgres::Config = address.parse().map_err(|error| {
            let (why, parameter) = (&error, refused(&error));
            Error::InvalidInput(format!("the address of the database cannot be read: {why}{parameter}"))
        })?;
        if config.get_hosts().is_empty() {
            // A certificate has to be for somebody.
            for address in config.get_hostaddrs().to_vec() {
                config.host(address.to_string());
            }
        }
        if config.get_application_name().is_none() {
            config.application_name("threadkeep");
        }
        Ok(Self { config, root_certificates })
    }

    /// The same for an operator's command, as with [`Options::is_command`].
    #[must_use]
    pub fn of_a_command(mut self) -> Self {
        name_as_command(&mut self.config);
        self
    }

    /// Opens connections to it. An attempt may take for ever, if the server hangs.
    ///
    /// # Errors
    /// [`Error::InvalidInput`]: the file of certificates, or a part of the address that would be ignored.
    pub fn opener(self) -> Result<Opener> {
        let Target { config, tls } = self.target()?;
        let connector = Connector::new(tls);
        Ok(Arc::new(move |heard| {
            let (connector, config) = (connector.clone().heard_by(heard), config.clone());
            let open = async move {
                let (client, driver) = connector.open(&config).await?;
                let is_own = is_own(&client).await?;
                Ok((client, driver, is_own))
            };
            open.boxed()
        }))
    }

    /// What to connect to. Nothing that was asked for is ignored.
    fn target(self) -> Result<Target> {
        let Self { config, root_certificates } = self;
        if servers(&config) > 1 && config.get_target_session_attrs() == TargetSessionAttrs::ReadOnly {
            let refused = "target_session_attrs=read-only: of several hosts the primary is connected to; leave it out, or name \
                one host";
            return Err(Error::InvalidInput(refused.to_owned()));
        }
        let tls = Tls::new(config.get_ssl_mode(), root_certificates)?;
        Ok(Target { config, tls })
    }
}

impl std::fmt::Debug for Address {
    /// Without the password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Address").finish_non_exhaustive()
    }
}

/// The address of a server, and how to connect to it.
pub(crate) struct Target {
    pub(crate) config: tokio_postgres::Config,
    pub(crate) tls: Tls,
}

impl Target {
    /// Parses a URL or a `key=value` text. TLS is used where the server has it; `sslmode=require` and stronger demand it,
    /// and a certificate that is trusted.
    pub(crate) fn parse(address: &str, patience: Duration) -> Result<Self> {
        let mut target = Address::parse(address)?.target()?;
        if !patience.is_zero() {
            if target.config.get_connect_timeout().is_none() {
                target.config.connect_timeout(patience);
            }
            limit_silence(&mut target.config, patience, &named(address));
        }
        Ok(target)
    }
}

/// Adds to the name of the sessions that a command's they are.
pub(crate) fn name_as_command(config: &mut tokio_postgres::Config) {
    let name = config.get_application_name().unwrap_or_default();
    // The server cuts a longer one.
    let name = &name[..name.floor_char_boundary(LONGEST_NAME - COMMAND.len())];
    let name = format!("{name}{COMMAND}");
    config.application_name(name);
}

/// The longest time that a connection may get no sign of the other side: about that of the system, if data is under way.
const LONGEST_SILENCE: Duration = Duration::from_mins(15);
/// The signs that may be asked for in vain, in that time.
const PROBES: u32 = 4;

/// Lets a connection fail once the machine of the other side has not been heard of for the patience, where the address
/// does not say how long: if a pooler's machine is lost, new connections lead to the same server through another one, and
/// an answer that can never come would be waited for as a slow one. Sockets of Unix ignore it. What the address has
/// `named` stays: the configuration does not show a zero, for which the system decides, or what is the default.
fn limit_silence(config: &mut tokio_postgres::Config, patience: Duration, named: &[String]) {
    let limit = patience.clamp(Duration::from_secs(1), LONGEST_SILENCE);
    // The system counts these in whole seconds, and accepts no zero.
    let pause = (limit / (PROBES + 1)).max(Duration::from_secs(1));
    let is_named = |names: &[&str]| named.iter().any(|name| names.contains(&name.as_str()));
    if !is_named(&["tcp_user_timeout"]) {
        config.tcp_user_timeout(limit);
    }
    if !is_named(&["keepalives_idle"]) {
        config.keepalives_idle(pause);
    }
    if !is_named(&["keepalives_interval"]) {
        config.keepalives_interval(pause);
    }
    if !is_named(&["keepalives_count", "keepalives_retries"]) {
        config.keepalives_retries(PROBES);
    }
}

/// The parameters of libpq that have no meaning here.
const UNKNOWN: [&str; 21] = [
    "client_encoding",
    "fallback_application_name",
    "gssdelegation",
    "gssencmode",
    "gsslib",
    "keepalives_count",
    "krbsrvname",
    "passfile",
    "replication",
    "require_auth",
    "requirepeer",
    "service",
    "ssl_max_protocol_version",
    "ssl_min_protocol_version",
    "sslcert",
    "sslcompression",
    "sslcrl",
    "sslkey",
    "sslpassword",
    "sslrootcert",
    "sslsni",
];

/// What is wrong with a parameter, if that is it. A name that libpq does not know either may be a part of the password, in
/// which something was not escaped.
fn refused(error: &tokio_postgres::Error) -> String {
    let cause = error.source().map(ToString::to_string).unwrap_or_default();
    if cause.starts_with("invalid value for option") {
        return format!(": {cause}");
    }
    match UNKNOWN.into_iter().find(|name| cause == format!("unknown option `{name}`")) {
        Some("sslrootcert" | "keepalives_count") => format!(": {cause}; write the address as a URL"),
        Some(_) => format!(": {cause}; leave it out"),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use tokio_postgres::config::SslMode;

    use super::*;

    #[test]
    fn tls_is_preferred_and_can_be_required_or_disabled() {
        let mode = |address: &str| Target::parse(address, Duration::ZERO).unwrap().config.get_ssl_mode();
        assert_eq!(mode("postgres://u@h/d"), SslMode::Prefer);
        assert_eq!(mode("postgres://u@h/d?sslmode=prefer"), SslMode::Prefer);
        assert_eq!(mode("postgres://u@h/d?sslmode=disable"), SslMode::Disable);
        assert_eq!(mode("hostaddr=10.0.0.1 user=u"), SslMode::Prefer);
        assert_eq!(mode("postgres://u@h/d?sslmode=require"), SslMode::Require);
        assert_eq!(mode("postgres://u@h/d?sslmode=verify-full&application_name=x"), SslMode::Require);
        assert_eq!(mode("host=h user=u sslmode=require"), SslMode::Require);
    }

    #[test]
    fn several_hosts_are_taken_apart() {
        let address = "postgres://u:p%40@a:1,b:2,c/d?sslmode=verify-full&target_session_attrs=read-write&sslrootcert=/r";
        let Address { config, root_certificates } = Address::parse(address).unwrap();
        assert_eq!((config.get_hosts().len(), config.get_ports()), (3, &[1, 2, 5432][..]));
        assert_eq!(config.get_ssl_mode(), SslMode::Require);
        assert_eq!(config.get_password(), Some(&b"p@"[..]));
        assert_eq!(root_certificates, Some("/r".into()));
        assert_eq!(Address::parse("postgres://u@a,b/d").unwrap().config.get_hosts().len(), 2);
    }

    #[test]
    fn parameters_are_read_as_libpq_reads_them() {
        let read = |query: &str| Address::parse(&format!("postgres://u@h/d?{query}")).unwrap();
        let named = |query: &str| read(query).config.get_application_name().map(str::to_owned);
        for (query, expected) in [
            ("application_name=a+b", "a+b"),
            ("application_name=a%2Bb%20c", "a+b c"),
            ("sslmode=verify-full&application_name=a+b&sslrootcert=/r", "a+b"),
            ("applicatio%6E_name=a%26b%3Dc", "a&b=c"),
        ] {
            assert_eq!(named(query).as_deref(), Some(expected), "{query}");
        }
        let options = read("options=-c%20lock_timeout=5+0").config;
        assert_eq!(options.get_options(), Some("-c lock_timeout=5+0"));
        assert_eq!(read("keepalives_count=3&keepalives_idle=9").config.get_keepalives_retries(), Some(3));
        let primary = read("target_session_attrs=primary").config.get_target_session_attrs();
        assert_eq!(primary, TargetSessionAttrs::ReadWrite);
        for (query, file) in
            [("sslrootcert=/a+b%20c", "/a+b c"), ("ssl%72ootcert=/r&connect_timeout=1", "/r")]
        {
            assert_eq!(read(query).root_certificates, Some(file.into()), "{query}");
        }
    }

    /// The client, which would take it for the end of the credentials, does not see this parameter.
    #[test]
    fn an_at_sign_in_the_name_of_the_trusted_certificate_ends_no_credentials() {
        for address in [
            "postgres://h/d?user=u&sslmode=verify-full&sslrootcert=/a@b",
            "postgresql:///d?host=h&user=u&sslrootcert=/a@b&sslmode=verify-ca",
            "postgres://u:p?q@h/d?sslmode=verify-full&sslrootcert=/a@b",
        ] {
            let Address { config, root_certificates } = Address::parse(address).unwrap();
            assert_eq!(root_certificates, Some("/a@b".into()), "{address}");
            assert_eq!((config.get_user(), config.get_hosts().len()), (Some("u"), 1), "{address}");
            assert_eq!(config.get_ssl_mode(), SslMode::Require, "{address}");
        }
    }

    #[test]
    fn a_bad_address_is_refused_without_telling_the_password() {
        for address in [
            "postgres://u:hunter2@h/d?nonsense=1",
            "postgres://u:hunter2@h/d?sslrootcert=/none&sslmode=require",
        ] {
            let error = Target::parse(address, Duration::ZERO).err().unwrap();
            assert!(matches!(error, Error::InvalidInput(_)), "{error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"));
        }
    }

    #[test]
    fn what_cannot_be_read_is_named_unless_it_may_be_a_part_of_the_password() {
        for (address, named) in [
            ("postgres://u:hunter2@h/d?sslmode=allow", "sslmode"),
            ("postgres://u:hunter2@h/d?connect_timeout=hunter2", "connect_timeout"),
            ("postgres://u:hunter2@h/d?target_session_attrs=prefer-standby", "target_session_attrs"),
            ("postgres://u:hunter2@h/d?keepalives_count=hunter2&sslmode=require", "keepalives_retries"),
            ("postgres://u:hunter2@h/d?sslcert=/c", "`sslcert`; leave it out"),
            ("host=h user=u password=hunter2 sslmode=verify-full", "sslmode"),
            ("host=h user=u password=hunter2 sslrootcert=/r", "`sslrootcert`; write the address as a URL"),
            ("postgres://u@h/d?password=a&hunter2=b", ""),
            ("host=h user=u password=a hunter2=b", ""),
        ] {
            let error = Address::parse(address).err().unwrap_or_else(|| panic!("{address}")).to_string();
            assert!(error.contains(named) && !error.contains("hunter2"), "{error}");
        }
    }

    /// Each part of an address is followed, or refused with its name.
    #[test]
    fn what_would_be_ignored_is_refused_with_its_name() {
        for (address, named) in [
            ("postgres://u:hunter2@h/d?sslrootcert=/none", "sslmode"),
            ("postgres://u:hunter2@h/d?sslmode=prefer&sslrootcert=/none", "sslmode"),
            ("postgres://u:hunter2@h/d?sslrootcert=/none&sslmode=disable", "sslmode"),
            ("postgres://u:hunter2@a,b/d?target_session_attrs=read-only", "target_session_attrs"),
            ("host=a,b user=u password=hunter2 target_session_attrs=read-only", "target_session_attrs"),
        ] {
            let opener = Address::parse(address).unwrap().opener().err();
            for error in [Target::parse(address, Duration::ZERO).err(), opener] {
                let error = error.unwrap_or_else(|| panic!("{address}")).to_string();
                assert!(error.contains(named) && !error.contains("hunter2"), "{error}");
            }
        }
        for address in ["postgres://u@a,b/d?target_session_attrs=read-write", "postgres://u@a,b/d"] {
            assert!(Target::parse(address, Duration::ZERO).is_ok(), "{address}");
        }
    }

    #[test]
    fn a_connection_to_a_lost_machine_fails_after_the_patience_unless_the_address_says_when() {
        let (seconds, minutes) = (Duration::from_secs, Duration::from_mins);
        let read = |query: &str, patience: Duration| {
            let config = Target::parse(&format!("postgres://u@h/d{query}"), patience).unwrap().config;
            let keepalives = (config.get_keepalives_interval(), config.get_keepalives_retries());
            (config.get_tcp_user_timeout().copied(), config.get_keepalives_idle(), keepalives)
        };
        for (patience, limit, pause) in [
            (seconds(10), seconds(10), seconds(2)),
            (Duration::from_millis(100), seconds(1), seconds(1)),
            (Duration::MAX, minutes(15), minutes(3)),
        ] {
            assert_eq!(read("", patience), (Some(limit), pause, (Some(pause), Some(4))), "{patience:?}");
        }
        let own = "?tcp_user_timeout=7&keepalives_idle=6&keepalives_interval=5&keepalives_count=3";
        for patience in [seconds(10), Duration::ZERO] {
            assert_eq!(read(own, patience), (Some(seconds(7)), seconds(6), (Some(seconds(5)), Some(3))));
        }
        assert_eq!(read("", Duration::ZERO), (None, Duration::from_hours(2), (None, None)));
        let none = Target::parse("postgres://u@h/d?keepalives=0", seconds(10)).unwrap().config;
        assert!(!none.get_keepalives());
    }

    #[test]
    fn what_an_address_says_of_silence_is_kept_also_if_it_is_the_default() {
        let read = |address: &str| {
            let config = Target::parse(address, Duration::from_secs(10)).unwrap().config;
            let keepalives = (config.get_keepalives_interval(), config.get_keepalives_retries());
            (config.get_tcp_user_timeout().copied(), config.get_keepalives_idle(), keepalives)
        };
        let (limit, pause) = (Some(Duration::from_secs(10)), Duration::from_secs(2));
        let (hours, probes) = (Duration::from_hours(2), (Some(pause), Some(4)));
        for (address, expected) in [
            (
                "postgres://u@h/d?tcp_user_timeout=0&keepalives_idle=7200&keepalives_count=0",
                (None, hours, (Some(pause), None)),
            ),
            ("postgres://u:a?b=c@h/d?tcp%5Fuser_timeout=0", (None, pause, probes)),
            ("postgres://u@h/d?keepalives_interval=0", (limit, pause, (None, Some(4)))),
            ("host=h user=u tcp_user_timeout=0", (None, pause, probes)),
            ("keepalives_idle = '7200'host=h keepalives_retries=9", (limit, hours, (Some(pause), Some(9)))),
            // Within a value it names nothing.
            ("postgres://u:a?tcp_user_timeout=0@h/d", (limit, pause, probes)),
            (r"host=h password='a\' tcp_user_timeout=0' user=b\ keepalives_idle=0", (limit, pause, probes)),
        ] {
            assert_eq!(read(address), expected, "{address}");
        }
    }

    #[test]
    fn the_certificates_of_the_system_may_be_named() {
        let read = |address: &str| Target::parse(address, Duration::ZERO).map(drop);
        assert_eq!(read("postgres://u@h/d?sslmode=verify-full&sslrootcert=system"), Ok(()));
        assert!(read("postgres://u@h/d?sslrootcert=system").is_err(), "they would not be looked at");
    }

    #[test]
    fn a_schema_is_quoted() {
        let quoted =
            |schema: &str| Options { schema: schema.to_owned(), ..Options::default() }.quoted_schema();
        assert_eq!(quoted("a\"b"), Ok("\"a\"\"b\"".to_owned()));
        assert!(quoted("").is_err() && quoted("a\0b").is_err() && quoted(&"x".repeat(64)).is_err());
    }
}
