//! TLS: what is trusted, and whether the server used it.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use threadkeep::{Error, Result};
use tokio_postgres::Socket;
use tokio_postgres::config::SslMode;
use tokio_postgres::tls::{MakeTlsConnect, TlsConnect};
use tokio_postgres_rustls::MakeRustlsConnect;

/// Connects with TLS, and remembers whether it did.
#[derive(Clone)]
pub(crate) struct Tls {
    inner: MakeRustlsConnect,
    used: Arc<AtomicBool>,
}

impl Tls {
    /// For a connection in this mode. With [`SslMode::Require`] the server must have a certificate that `roots` or the
    /// system's certificates vouch for; with [`SslMode::Prefer`], which would accept no TLS at all, any will do.
    ///
    /// # Errors
    /// [`Error::InvalidInput`]: `roots` cannot be read, or would be ignored.
    pub(crate) fn new(mode: SslMode, roots: Option<PathBuf>) -> Result<Self> {
        if roots.is_some() && mode != SslMode::Require {
            let ignored = "sslrootcert: certificates are checked with sslmode=require or verify-full only; add that, or leave it \
                out";
            return Err(Error::InvalidInput(ignored.to_owned()));
        }
        Ok(Self { inner: MakeRustlsConnect::new(client(mode, roots)?), used: Arc::default() })
    }

    /// The same for one connection.
    pub(crate) fn for_one(&self) -> Self {
        Self { inner: self.inner.clone(), used: Arc::default() }
    }

    /// Whether the server agreed to TLS.
    pub(crate) fn was_used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }
}

/// The settings of the handshakes.
fn client(mode: SslMode, roots: Option<PathBuf>) -> Result<ClientConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone());
    let builder = builder.with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| Error::InvalidInput(format!("TLS: {error}")))?;
    let mut client = match mode {
        SslMode::Prefer => builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(AnyCertificate(provider)))
            .with_no_client_auth(),
        SslMode::Disable => builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth(),
        _ => builder.with_root_certificates(trusted(roots)?).with_no_client_auth(),
    };
    // With sslnegotiation=direct a server refuses a handshake that does not name it.
    client.alpn_protocols = vec![b"postgresql".to_vec()];
    Ok(client)
}

type Inner = <MakeRustlsConnect as MakeTlsConnect<Socket>>::TlsConnect;

impl MakeTlsConnect<Socket> for Tls {
    type Stream = <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream;
    type TlsConnect = Noted;
    type Error = <MakeRustlsConnect as MakeTlsConnect<Socket>>::Error;

    fn make_tls_connect(&mut self, domain: &str) -> Result<Noted, Self::Error> {
        let inner = MakeTlsConnect::<Socket>::make_tls_connect(&mut self.inner, domain)?;
        Ok(Noted { inner, used: Arc::clone(&self.used) })
    }
}

/// One handshake.
pub(crate) struct Noted {
    inner: Inner,
    used: Arc<AtomicBool>,
}

impl TlsConnect<Socket> for Noted {
    type Stream = <Inner as TlsConnect<Socket>>::Stream;
    type Error = io::Error;
    type Future = <Inner as TlsConnect<Socket>>::Future;

    fn connect(self, stream: Socket) -> Self::Future {
        self.used.store(true, Ordering::Relaxed);
        self.inner.connect(stream)
    }
}

/// Accepts every certificate: against somebody who only listens, which is what can be had without knowing whom to trust.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// The certificates to trust for the server: those in the file, else those of the system, which libpq calls `system`.
fn trusted(file: Option<PathBuf>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    let Some(file) = file.filter(|file| file.as_os_str() != "system") else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        return Ok(roots);
    };
    let wrong = |why: String| Error::InvalidInput(format!("sslrootcert {}: {why}", file.display()));
    let certificates = CertificateDer::pem_file_iter(&file).map_err(|error| wrong(error.to_string()))?;
    for certificate in certificates {
        let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
        roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
    }
    if roots.is_empty() { Err(wrong("there is no certificate in it".to_owned())) } else { Ok(roots) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handshake_names_the_protocol() {
        for mode in [SslMode::Prefer, SslMode::Require] {
            assert_eq!(client(mode, None).unwrap().alpn_protocols, [b"postgresql"], "{mode:?}");
        }
    }

    #[test]
    fn the_certificates_of_the_system_can_be_named() {
        assert!(Tls::new(SslMode::Require, Some("system".into())).is_ok());
        let ignored = Tls::new(SslMode::Prefer, Some("system".into())).err().unwrap().to_string();
        assert!(ignored.contains("sslmode"), "{ignored}");
        let missing = Tls::new(SslMode::Require, Some("/none/system".into())).err().unwrap().to_string();
        assert!(missing.contains("/none/system"), "{missing}");
    }
}
