//! The question before a command deletes or repairs something.

use std::io::{self, IsTerminal as _, Write as _};

use super::error::{OpsError, Result};

/// Whether somebody can read a question and answer it.
pub(crate) fn can_be_asked() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Asks on the terminal.
///
/// # Errors
/// [`OpsError::Refused`] if the answer is not yes, or, with `unasked`, if there is no terminal.
pub(crate) async fn ask(question: String, refused: &'static str, unasked: &'static str) -> Result<()> {
    if !can_be_asked() {
        return Err(OpsError::Refused(unasked));
    }
    // A signal must end the command while it waits for the answer.
    let answer = tokio::task::spawn_blocking(move || -> io::Result<String> {
        let (mut terminal, mut answer) = (io::stderr(), String::new());
        write!(terminal, "{question} [y/N] ")?;
        terminal.flush()?;
        io::stdin().read_line(&mut answer)?;
        Ok(answer)
    });
    let answer = answer.await.map_err(io::Error::from)??;
    if matches!(answer.trim().to_lowercase().as_str(), "y" | "yes") {
        Ok(())
    } else {
        Err(OpsError::Refused(refused))
    }
}
