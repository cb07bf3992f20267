//! The text of a database's address: the parameters that the client does not read, or does not show.

use std::borrow::Cow;
use std::path::PathBuf;

use url::form_urlencoded;

/// Extracts from a URL what only this driver understands, the file of the trusted certificate; and translates what
/// libpq says in another way: the modes that mean `require` here, the primary, and the number of probes.
pub(crate) fn split_root_certificate(address: &str) -> (String, Option<PathBuf>) {
    let Some((place, query)) = split_query(address) else { return (address.to_owned(), None) };
    let mut roots = None;
    let mut kept = Vec::new();
    for parameter in query.split('&') {
        let read = decoded(parameter);
        match read.as_ref().map(|(key, value)| (key.as_str(), value.as_str())) {
            Some(("sslrootcert", path)) => roots = Some(PathBuf::from(path)),
            Some(("sslmode", "verify-ca" | "verify-full")) => kept.push(Cow::Borrowed("sslmode=require")),
            Some(("target_session_attrs", "primary")) => kept.push("target_session_attrs=read-write".into()),
            // The system's number, which the client would not accept so.
            Some(("keepalives_count", "0")) => {}
            Some(("keepalives_count", _)) => {
                let count = parameter.split_once('=').map_or("", |(_, count)| count);
                kept.push(format!("keepalives_retries={count}").into());
            }
            _ => kept.push(parameter.into()),
        }
    }
    (format!("{place}?{}", kept.join("&")), roots)
}

/// The names of the parameters in an address that can be read.
pub(crate) fn named(address: &str) -> Vec<String> {
    if let Some((_, query)) = split_query(address) {
        return query.split('&').filter_map(decoded).map(|(name, _)| name).collect();
    }
    let (mut names, mut rest) = (Vec::new(), address);
    while let Some((name, value)) = rest.split_once('=') {
        names.push(name.trim().to_owned());
        let value = value.trim_start();
        let quoted = value.strip_prefix('\'');
        let (value, mut is_escaped) = (quoted.unwrap_or(value), false);
        let end = value.find(|c: char| {
            let ends = !is_escaped && if quoted.is_some() { c == '\'' } else { c.is_whitespace() };
            is_escaped = !is_escaped && c == '\\';
            ends
        });
        rest = end.map_or("", |end| &value[end..]);
        if quoted.is_some() {
            rest = rest.strip_prefix('\'').unwrap_or(rest);
        }
    }
    names
}

/// What is before the parameters of a URL, and these: they follow the credentials. As for libpq, an `@` ends these only
/// before the first slash; later ones belong to a parameter. Other parsers do not accept several hosts in a URL.
fn split_query(address: &str) -> Option<(&str, &str)> {
    let rest = ["postgres://", "postgresql://"].iter().find_map(|scheme| address.strip_prefix(scheme))?;
    let server = rest.find('@').filter(|at| !rest[..*at].contains('/')).unwrap_or(0);
    let at = address.len() - rest.len() + server + rest[server..].find('?')?;
    Some((&address[..at], &address[at + 1..]))
}

/// The name and the value of a parameter of a URL. A `+` is a plus here, as for libpq: this is no form.
fn decoded(parameter: &str) -> Option<(String, String)> {
    let literal = parameter.replace('+', "%2B");
    let (name, value) = form_urlencoded::parse(literal.as_bytes()).next()?;
    Some((name.into_owned(), value.into_owned()))
}
