//! Finds the thread that the user means.

use threadkeep::Error;
use threadkeep::id::ThreadId;

use crate::client::{Client, ClientError, Listed, ThreadSummary};

/// The thread written last.
///
/// # Errors
/// [`ClientError::Invalid`] if there is none, or if it may be one that is damaged, and the client's.
pub(super) async fn newest(client: &Client) -> Result<String, ClientError> {
    let Listed { mut list, damaged } = client.listed_threads(1).await?;
    // A message must not go to a thread that only seems to be the newest.
    if let Some(unread) = unread(&damaged) {
        let text = format!("the thread written last is not known: {unread}; name one with --resume");
        return Err(ClientError::Invalid(text));
    }
    let newest = list.thread_list.pop().map(|thread| thread.thread_id);
    newest.ok_or_else(|| ClientError::Invalid("there is no thread to continue".to_owned()))
}

/// The thread with this id, else the one with this title.
///
/// # Errors
/// [`ClientError::Invalid`] if there is none or if several have the title, and the client's.
pub(super) async fn named(client: &Client, named: &str) -> Result<String, ClientError> {
    if client.has_thread(named).await? {
        return Ok(named.to_owned());
    }
    let Listed { list, damaged } = client.listed_threads(usize::MAX).await?;
    among(list.thread_list, named).map_err(|problem| {
        let unread = unread(&damaged).map(|unread| format!("; {unread}"));
        ClientError::Invalid(problem + &unread.unwrap_or_default())
    })
}

/// Which threads cannot be read, and why the first of them cannot; `None` without any.
pub(super) fn unread(damaged: &[(ThreadId, Error)]) -> Option<String> {
    let (_, error) = damaged.first()?;
    let threads: Vec<&str> = damaged.iter().map(|(thread, _)| thread.as_str()).collect();
    Some(format!("cannot read {}: {error}", threads.join(", ")))
}

fn among(threads: Vec<ThreadSummary>, named: &str) -> Result<String, String> {
    if threads.iter().any(|thread| thread.thread_id == named) {
        return Ok(named.to_owned());
    }
    let titled = threads.into_iter().filter(|thread| thread.title.as_deref() == Some(named));
    let mut ids: Vec<String> = titled.map(|thread| thread.thread_id).collect();
    match ids.len() {
        0 => Err(format!("no thread has the id or the title '{named}'")),
        1 => Ok(ids.remove(0)),
        _ => Err(format!("several threads have the title '{named}': {}; name one by its id", ids.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(id: &str, title: Option<&str>) -> ThreadSummary {
        ThreadSummary {
            thread_id: id.to_owned(),
            created_at: String::new(),
            updated_at: String::new(),
            latest_checkpoint_id: String::new(),
            title: title.map(str::to_owned),
        }
    }

    #[test]
    fn an_id_counts_before_a_title_and_a_title_must_be_one_threads() {
        let threads = || {
            vec![
                thread("a", Some("b")),
                thread("b", Some("trip")),
                thread("c", Some("x")),
                thread("d", Some("x")),
            ]
        };
        assert_eq!(among(threads(), "b").unwrap(), "b", "an id");
        assert_eq!(among(threads(), "trip").unwrap(), "b");
        assert!(among(threads(), "nothing").unwrap_err().contains("'nothing'"));
        let several = among(threads(), "x").unwrap_err();
        assert!(several.contains("c, d"), "{several}");
    }
}
