//! Whether a process stores checkpoints in the form that its database remembers.

use threadkeep_config::Config;
use threadkeep_records::{CheckpointForm, Records, RecordsError};

use crate::channel_mode;

/// What a process with this configuration does otherwise than the database remembers, what follows from it, and the
/// remedy: for its operator, at each start. If nothing is remembered, this form is from now on.
///
/// # Errors
/// See [`Records::agree_on_form`].
pub async fn form_difference(records: &Records, config: &Config) -> Result<Option<String>, RecordsError> {
    let ours = CheckpointForm {
        mode: channel_mode(config).as_str().to_owned(),
        frequency: config.snapshot_frequency(),
    };
    Ok(records.agree_on_form(&ours).await?.map(|theirs| described(&theirs, &ours)))
}

fn described(theirs: &CheckpointForm, ours: &CheckpointForm) -> String {
    let (mut found, mut cadence) = (Vec::new(), String::new());
    if theirs.mode != ours.mode {
        found.push(format!(
            "the threads of this database are stored in {} mode, and database.checkpoint_channel_mode of this process is {}: \
             a process in full mode refuses threads that one in delta mode has written to",
            theirs.mode, ours.mode
        ));
    }
    if theirs.frequency != ours.frequency {
        found.push(format!(
            "database.checkpoint_delta.snapshot_frequency of this database is {}, and that of this process is {}: in delta \
             mode how fast a thread is read, and how large it is, depends on which process writes to it",
            theirs.frequency, ours.frequency
        ));
        cadence = format!(" --frequency {}", ours.frequency);
    }
    format!(
        "{}; give all processes the same settings, and run 'threadkeep convert --all --to {}{cadence}' if the database should \
         have those of this process",
        found.join("; "),
        ours.mode
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_difference_is_named_with_what_follows_and_the_command_that_settles_it() {
        let form = |mode: &str, frequency| CheckpointForm { mode: mode.to_owned(), frequency };
        let (mode, cadence) = ("refuses threads", "how fast a thread is read");
        for (theirs, ours, says, command) in [
            (form("full", 10), form("delta", 10), &[mode][..], "'threadkeep convert --all --to delta'"),
            (
                form("delta", 3),
                form("delta", 7),
                &[cadence],
                "'threadkeep convert --all --to delta --frequency 7'",
            ),
            (
                form("delta", 3),
                form("full", 7),
                &[mode, cadence],
                "'threadkeep convert --all --to full --frequency 7'",
            ),
        ] {
            let said = described(&theirs, &ours);
            for part in [mode, cadence] {
                assert_eq!(said.contains(part), says.contains(&part), "{said}");
            }
            assert!(said.contains(command), "{said}");
        }
    }
}
