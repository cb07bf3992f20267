//! Certificates for servers on the loopback interface.

use std::path::Path;

use crate::Result;
use crate::tools::{Tool, User, run};

/// Creates the certificates.
pub(crate) const OPENSSL: Tool = Tool { name: "openssl", package: "openssl" };

const SETTINGS: &str = "
[req]
distinguished_name = name
x509_extensions = server
prompt = no
[name]
CN = localhost
[server]
basicConstraints = critical, CA:FALSE
subjectAltName = DNS:localhost, IP:127.0.0.1
";

/// Creates `{name}.key` and a self-signed `{name}.crt` in a directory.
pub(crate) fn make(user: User, openssl: &Path, directory: &Path, name: &str) -> Result<()> {
    user.write(&directory.join("certificate.conf"), SETTINGS)?;
    run(user.command(openssl, directory).args(["req", "-x509", "-nodes", "-days", "2"]).args([
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-config",
        "certificate.conf",
        "-keyout",
        &format!("{name}.key"),
        "-out",
        &format!("{name}.crt"),
    ]))
}
