//! Which web pages may use the API.
//!
//! A browser sends what any page asks it to, so a gateway without keys must distinguish pages: those of other origins
//! cannot change anything unless they are allowed, and only this machine's host names are accepted. With keys, a page
//! needs a key, which no browser adds by itself.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};

use super::error::ApiError;
use threadkeep_config::Environment;

/// The variable with the comma-separated origins whose pages may use the API; `*` allows all.
const VARIABLE: &str = "GATEWAY_CORS_ORIGINS";
/// In which browsers say which site a request comes from.
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// Parameters with which a GET or HEAD ends a run.
const CHANGING: [&str; 2] = ["action", "cancel_on_disconnect"];
const CROSS_SITE: &str =
    "Cross-site request denied. List the origins whose pages may use the API in GATEWAY_CORS_ORIGINS.";
const UNKNOWN_HOST: &str = "Without authentication the gateway answers only to localhost and to IP addresses. \
     See auth.enabled and auth.allow_unauthenticated in the configuration.";

/// The origins whose pages may use the API.
#[derive(Debug, Clone, Default)]
pub(super) struct Origins {
    any: bool,
    listed: Arc<[HeaderValue]>,
}

impl Origins {
    /// The origins that the operator allowed.
    pub(super) fn of(environment: &Environment) -> Self {
        let entries = environment.non_empty(VARIABLE).unwrap_or_default();
        let entries = entries.split(',').map(str::trim).filter(|entry| !entry.is_empty());
        let (mut any, mut listed) = (false, Vec::new());
        for entry in entries {
            if entry == "*" {
                any = true;
            } else if let Some(origin) = origin(entry) {
                listed.push(origin);
            } else {
                tracing::warn!(
                    "{VARIABLE}: ignoring an entry that is not an origin such as https://app.example"
                );
            }
        }
        Self { any, listed: listed.into() }
    }

    fn contain(&self, origin: &HeaderValue) -> bool {
        self.any || self.listed.contains(origin)
    }

    /// The layer that lets their pages use the API and read the headers that locate runs; `None` if there are no
    /// origins.
    pub(super) fn layer(&self) -> Option<CorsLayer> {
        let allowed = match (self.any, self.listed.is_empty()) {
            (true, _) => AllowOrigin::any(),
            (false, true) => return None,
            (false, false) => AllowOrigin::list(self.listed.iter().cloned()),
        };
        Some(
            CorsLayer::new()
                .allow_origin(allowed)
                .allow_methods(AllowMethods::mirror_request())
                .allow_headers(AllowHeaders::mirror_request())
                .expose_headers([header::CONTENT_LOCATION, header::LOCATION]),
        )
    }
}

/// The port that browsers leave out of an origin of each scheme.
const USUAL_PORTS: [(&str, &str); 2] = [("http://", ":80"), ("https://", ":443")];

/// The origin of an entry as browsers send it: in lower case, without the usual port, and without the slash that ends a
/// copied address. `None` for what they never send, which would let nobody in.
fn origin(entry: &str) -> Option<HeaderValue> {
    let entry = entry.strip_suffix('/').unwrap_or(entry).to_ascii_lowercase();
    let usual = USUAL_PORTS.iter().find(|(scheme, _)| entry.starts_with(*scheme));
    let origin = usual.and_then(|(_, port)| entry.strip_suffix(*port)).unwrap_or(&entry);
    let is_place = |place: &str| !place.is_empty() && !place.contains(['/', '*']);
    let is_origin = origin == "null"
        || origin.split_once("://").is_some_and(|(scheme, place)| !scheme.is_empty() && is_place(place));
    origin.parse().ok().filter(|_| is_origin)
}

/// What a gateway without authentication accepts.
#[derive(Debug, Clone)]
pub(super) struct Guard {
    pub(super) origins: Origins,
    /// Whether it accepts any host name, as behind a reverse proxy.
    pub(super) any_host: bool,
}

/// The layer that refuses what [`Guard`] does not accept.
pub(super) async fn guard(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    match guard.check(&request) {
        Ok(()) => next.run(request).await,
        Err(refusal) => ApiError::new(StatusCode::FORBIDDEN, refusal).into_response(),
    }
}

impl Guard {
    fn check(&self, request: &Request) -> Result<(), &'static str> {
        let host = host(request);
        // An attacker can point a DNS name at this machine to make their page same-origin (DNS rebinding).
        if !self.any_host && !host.is_none_or(is_local) {
            return Err(UNKNOWN_HOST);
        }
        if !changes(request) || self.same_site(request.headers(), host) {
            return Ok(());
        }
        Err(CROSS_SITE)
    }

    /// Whether the request does not come from a page of a foreign origin.
    fn same_site(&self, headers: &HeaderMap, host: Option<&str>) -> bool {
        let origin = headers.get(header::ORIGIN);
        if origin.is_some_and(|origin| self.origins.contain(origin)) {
            return true;
        }
        is_of_host(headers, host)
    }
}

/// Whether the request does not come from a page of another origin than this gateway's.
pub(super) fn is_same_site(headers: &HeaderMap) -> bool {
    is_of_host(headers, headers.get(header::HOST).and_then(|host| host.to_str().ok()))
}

fn is_of_host(headers: &HeaderMap, host: Option<&str>) -> bool {
    if let Some(site) = headers.get(SEC_FETCH_SITE) {
        return site == "same-origin" || site == "none";
    }
    let Some(origin) = headers.get(header::ORIGIN) else { return true };
    let origin = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
    origin.is_some_and(|(_, place)| Some(place) == host)
}

/// Whether the request may change something: by its method, or because it joins a run and asks for its end. Any page can
/// make a browser send a GET, for example as the address of an image.
pub(super) fn changes(request: &Request) -> bool {
    if !request.method().is_safe() {
        return true;
    }
    // As the handlers read it, whatever is percent-encoded.
    match Query::<Vec<(String, String)>>::try_from_uri(request.uri()) {
        Ok(Query(parameters)) => parameters.iter().any(|(name, _)| CHANGING.contains(&name.as_str())),
        Err(_) => true,
    }
}

/// The host name that the client used.
fn host(request: &Request) -> Option<&str> {
    let named = request.headers().get(header::HOST).map(|host| host.to_str().unwrap_or_default());
    named.or_else(|| request.uri().authority().map(axum::http::uri::Authority::as_str))
}

/// Whether a host, with or without a port, is this machine's name or an IP address.
fn is_local(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.ends_with(':') => name,
        _ => host,
    };
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    name == "localhost" || name.ends_with(".localhost") || address.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn origins(list: &str) -> Origins {
        Origins::of(&Environment::from_iter([(VARIABLE, list)]))
    }

    fn check(guard: &Guard, method: &str, headers: &[(&str, &str)]) -> Result<(), &'static str> {
        check_at("/api/threads", guard, method, headers)
    }

    fn check_at(
        uri: &str,
        guard: &Guard,
        method: &str,
        headers: &[(&str, &str)],
    ) -> Result<(), &'static str> {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        guard.check(&request.body(Body::empty()).unwrap())
    }

    #[test]
    fn an_origin_is_listed_as_browsers_send_it_and_nothing_else_is() {
        let found = origins(
            "https://A.example/, http://b.example:3000, null, c.example, https://d.example/path, https://*.example, \
             */, ://, https://, https://e\u{7f}.example",
        );
        let listed: Vec<&str> = found.listed.iter().map(|origin| origin.to_str().unwrap()).collect();
        assert_eq!(listed, ["https://a.example", "http://b.example:3000", "null"]);
        assert!(!found.any);
        assert!(origins("https://a.example, *").any);
    }

    #[test]
    fn the_usual_port_of_an_origin_is_left_out_as_browsers_do() {
        for (entry, listed) in [
            ("https://a.example:443", Some("https://a.example")),
            ("http://A.example:80/", Some("http://a.example")),
            ("http://[::1]:80", Some("http://[::1]")),
            ("https://a.example:80", Some("https://a.example:80")),
            ("http://a.example:443", Some("http://a.example:443")),
            ("https://[::443]", Some("https://[::443]")),
            ("https://:443", None),
        ] {
            let found = origins(entry);
            assert_eq!(found.listed.first().map(|origin| origin.to_str().unwrap()), listed, "{entry}");
        }
    }

    #[test]
    fn only_names_of_this_machine_and_addresses_are_local() {
        for host in [
            "localhost",
            "LOCALHOST:8001",
            "localhost.",
            "app.localhost:1",
            "127.0.0.1",
            "127.0.0.1:8001",
            "[::1]",
            "[::1]:8001",
            "10.1.2.3:80",
            "::1",
        ] {
            assert!(is_local(host), "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:8001",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "",
            "xlocalhost",
        ] {
            assert!(!is_local(host), "{host}");
        }
    }

    #[test]
    fn another_name_is_refused_unless_the_operator_allows_any() {
        let mut guard = Guard { origins: Origins::default(), any_host: false };
        let evil = [("host", "evil.example:8001")];
        assert_eq!(check(&guard, "GET", &evil), Err(UNKNOWN_HOST));
        assert_eq!(check(&guard, "POST", &evil), Err(UNKNOWN_HOST));
        assert_eq!(check(&guard, "POST", &[("host", "127.0.0.1:8001")]), Ok(()));
        assert_eq!(check(&guard, "POST", &[]), Ok(()), "a client of HTTP/1.0");
        guard.any_host = true;
        assert_eq!(check(&guard, "POST", &evil), Ok(()));
    }

    /// The address of an image in any page.
    #[test]
    fn a_get_that_ends_a_run_is_checked_like_a_post() {
        let guard = Guard { origins: Origins::default(), any_host: false };
        let stream = "/api/threads/t/runs/r/stream";
        let cross = [("host", "localhost:8001"), ("sec-fetch-site", "cross-site")];
        for query in [
            "action=rollback",
            "action=interrupt",
            "wait=1&%61ction=rollback",
            "a%63tion=rollback",
            "cancel_on_disconnect=true",
            "action",
            "x=%ff&action=rollback",
        ] {
            for method in ["GET", "HEAD"] {
                let uri = format!("{stream}?{query}");
                assert_eq!(check_at(&uri, &guard, method, &cross), Err(CROSS_SITE), "{method} {query}");
                assert_eq!(check_at(&uri, &guard, method, &cross[..1]), Ok(()), "no page");
                let own = [cross[0], ("sec-fetch-site", "same-origin")];
                assert_eq!(check_at(&uri, &guard, method, &own), Ok(()));
            }
        }
        for query in ["", "?stream_mode=values", "?reaction=x"] {
            assert_eq!(check_at(&format!("{stream}{query}"), &guard, "GET", &cross), Ok(()), "{query}");
        }
    }

    #[test]
    fn pages_of_other_origins_change_nothing_unless_they_are_allowed() {
        let guard = Guard { origins: origins("http://app.example"), any_host: false };
        let host = ("host", "localhost:8001");
        for (headers, allowed) in [
            (vec![], true),
            (vec![("origin", "http://localhost:8001")], true),
            (vec![("origin", "http://localhost:3000")], false),
            (vec![("origin", "http://evil.example")], false),
            (vec![("origin", "null")], false),
            (vec![("origin", "http://app.example")], true),
            (vec![("origin", "http://app.example.evil.example")], false),
            (vec![("sec-fetch-site", "same-origin")], true),
            (vec![("sec-fetch-site", "none")], true),
            (vec![("sec-fetch-site", "same-site")], false),
            (vec![("sec-fetch-site", "cross-site")], false),
            (vec![("sec-fetch-site", "cross-site"), ("origin", "http://app.example")], true),
        ] {
            let headers = [vec![host], headers].concat();
            let expected = if allowed { Ok(()) } else { Err(CROSS_SITE) };
            for method in ["POST", "PUT", "PATCH", "DELETE"] {
                assert_eq!(check(&guard, method, &headers), expected, "{method} {headers:?}");
            }
            for method in ["GET", "HEAD", "OPTIONS"] {
                assert_eq!(check(&guard, method, &headers), Ok(()), "{method} {headers:?}");
            }
        }
        let any = Guard { origins: origins("*"), any_host: false };
        assert_eq!(check(&any, "POST", &[host, ("origin", "http://evil.example")]), Ok(()));
    }
}
