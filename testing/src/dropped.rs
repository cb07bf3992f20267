//! Futures that are given up where they wait.

use std::pin::Pin;
use std::task::{Context, Poll};

/// Polls a future until it has been pending a number of times, and drops it then, as a caller does that gives up.
pub struct DropAfter<F> {
    future: Pin<Box<F>>,
    left: usize,
}

impl<F: Future> DropAfter<F> {
    /// Drops `future` when it waits after it was pending `waits` times.
    pub fn waits(future: F, waits: usize) -> Self {
        Self { future: Box::pin(future), left: waits }
    }
}

impl<F: Future> Future for DropAfter<F> {
    /// `None` if the future was dropped.
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if self.left == 0 => Poll::Ready(None),
            Poll::Pending => {
                self.left -= 1;
                Poll::Pending
            }
        }
    }
}
