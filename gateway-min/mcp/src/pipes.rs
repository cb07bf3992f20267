//! The pipes of a program, as a transport that ends if the program does not read.

use std::io;
use std::sync::Arc;

use rmcp::RoleClient;
use rmcp::model::JsonRpcMessage;
use rmcp::service::{RxJsonRpcMessage, TxJsonRpcMessage};
use rmcp::transport::Transport;
use rmcp::transport::async_rw::AsyncRwTransport;
use tokio::process::{ChildStdin, ChildStdout};
use tokio::sync::watch;

/// The most answers that wait to be written. A program that asks on without reading them would fill the memory.
const ANSWERS_MAX: usize = 256;

pub(crate) struct Pipes {
    inner: AsyncRwTransport<RoleClient, ChildStdout, ChildStdin>,
    /// Each answer that is not written yet holds it too.
    answers: Arc<()>,
    /// Whether what is not written yet is given up.
    ended: watch::Sender<bool>,
}

impl Pipes {
    pub(crate) fn new(stdout: ChildStdout, stdin: ChildStdin) -> Self {
        let inner = AsyncRwTransport::new(stdout, stdin);
        Self { inner, answers: Arc::default(), ended: watch::Sender::new(false) }
    }
}

impl Transport<RoleClient> for Pipes {
    type Error = io::Error;

    fn send(
        &mut self,
        item: TxJsonRpcMessage<RoleClient>,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send + 'static {
        let is_answer = matches!(item, JsonRpcMessage::Response(_) | JsonRpcMessage::Error(_));
        let unwritten = is_answer.then(|| Arc::clone(&self.answers));
        let sent = self.inner.send(item);
        let mut ended = self.ended.subscribe();
        async move {
            let result = tokio::select! {
                biased;
                result = sent => result,
                _ = ended.wait_for(|ended| *ended) => Err(io::ErrorKind::NotConnected.into()),
            };
            drop(unwritten);
            result
        }
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleClient>> {
        if Arc::strong_count(&self.answers) > ANSWERS_MAX {
            self.ended.send_replace(true);
            return None;
        }
        self.inner.receive().await
    }

    async fn close(&mut self) -> Result<(), Self::Error> {
        // A program that does not read would never be rid of the pipe: closing it waits for what is being written.
        self.ended.send_replace(true);
        self.inner.close().await
    }
}
