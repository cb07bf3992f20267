//! The sockets on which the gateway listens.

use std::io;
use std::net::SocketAddr;

use axum::serve::{Listener, ListenerExt as _};
use tokio::net::{TcpListener, TcpStream};

/// Binds `address`. Accepted connections send at once what is written to them: the frames of a stream are small, and
/// Nagle's algorithm would hold each back until the client had acknowledged the one before, about 40 ms later.
///
/// # Errors
/// What the system says, for example that the address is in use.
pub async fn listen(address: SocketAddr) -> io::Result<impl Listener<Io = TcpStream, Addr = SocketAddr>> {
    Ok(TcpListener::bind(address).await?.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            // It works without, more slowly.
            tracing::debug!(%error, "a connection waits for acknowledgements between frames");
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn accepted_connections_do_not_wait_for_acknowledgements() {
        let mut listener = listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let ((accepted, _), client) = tokio::join!(listener.accept(), client);
        assert!(accepted.nodelay().unwrap());
        drop(client);
    }
}
