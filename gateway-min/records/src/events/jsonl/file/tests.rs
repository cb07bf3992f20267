use chrono::DateTime;
use proptest::prelude::*;
use serde_json::json;
use tempfile::TempDir;

use super::*;

fn event(text: &str) -> PreparedEvent {
    PreparedEvent {
        event_type: "llm.human.input".to_owned(),
        category: "message".to_owned(),
        content: json!({ "text": text }),
        metadata: serde_json::Map::new(),
        created_at: DateTime::UNIX_EPOCH,
    }
}

struct Feed(TempDir);

impl Feed {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("t.jsonl")
    }

    fn append(&self, run: &str, texts: &[&str]) -> Result<Vec<i64>, RecordsError> {
        let events = texts.iter().map(|text| event(text)).collect();
        let held = FeedFile::hold(self.path(), "t".to_owned())?;
        Ok(held.append(vec![(run.to_owned(), events)], None)?.numbers)
    }

    fn read(&self) -> Result<Vec<(i64, String)>, RecordsError> {
        let events = select(File::open(self.path()).unwrap(), &self.path(), "t", usize::MAX, |_| true)?;
        Ok(events
            .into_iter()
            .map(|event| (event.seq, event.content["text"].as_str().unwrap().to_owned()))
            .collect())
    }

    fn numbers(&self) -> Vec<i64> {
        self.read().unwrap().into_iter().map(|(seq, _)| seq).collect()
    }
}

#[test]
fn a_feed_reads_back_one_document_a_line() {
    let feed = Feed::new();
    assert_eq!(feed.append("r", &["a\nb\u{0}\u{e9}", ""]).unwrap(), [1, 2]);
    assert_eq!(feed.append("s", &["c"]).unwrap(), [3]);
    assert_eq!(feed.append("s", &[]).unwrap(), [0_i64; 0]);
    let expected = [(1, "a\nb\u{0}\u{e9}"), (2, ""), (3, "c")].map(|(seq, text)| (seq, text.to_owned()));
    assert_eq!(feed.read().unwrap(), expected);
    let text = fs::read_to_string(feed.path()).unwrap();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((lines.len(), &lines[0]["run_id"], &lines[2]["seq"]), (3, &json!("r"), &json!(3)));
}

/// Cut anywhere, as by a crash: the earlier appends remain, the truncated one is removed, and its numbers are assigned
/// again.
#[test]
fn a_call_that_was_cut_off_anywhere_is_taken_back() {
    let feed = Feed::new();
    feed.append("r", &["one", "two"]).unwrap();
    let whole = fs::read(feed.path()).unwrap();
    feed.append("r", &["three", "four", "five"]).unwrap();
    let all = fs::read(feed.path()).unwrap();
    for cut in 0..=all.len() {
        let calls = if cut == all.len() {
            5
        } else if cut >= whole.len() {
            2
        } else {
            0
        };
        for padding in [&b""[..], b"\0\0\0", b"\0\0\n"] {
            if cut == all.len() && !padding.is_empty() {
                continue;
            }
            fs::write(feed.path(), [&all[..cut], padding].concat()).unwrap();
            assert_eq!(feed.numbers(), (1..=calls).collect::<Vec<_>>(), "cut at {cut}");
            assert_eq!(feed.append("s", &["new"]).unwrap(), [calls + 1], "cut at {cut}");
            assert_eq!(feed.numbers(), (1..=calls + 1).collect::<Vec<_>>(), "cut at {cut}");
            assert_eq!(feed.read().unwrap().last().unwrap().1, "new");
        }
    }
}

#[test]
fn what_is_damaged_is_an_error_and_stays_as_it_is() {
    let feed = Feed::new();
    for text in ["one", "two", "three"] {
        feed.append("r", &[text]).unwrap();
    }
    let text = fs::read_to_string(feed.path()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    for (damaged, line) in [
        (text.replacen("\"seq\":2", "\"seq\":1", 1), 2),
        (text.replacen("\"seq\":2", "\"seq\":x", 1), 2),
        (format!("{}\n{}\n{}\n", lines[1], lines[0], lines[2]), 2),
        (text.replacen("\"thread_id\":\"t\"", "\"thread_id\":\"u\"", 1), 1),
        (format!("[]\n{text}"), 1),
    ] {
        fs::write(feed.path(), &damaged).unwrap();
        match feed.read() {
            Err(RecordsError::Corrupt { place, .. }) => {
                assert!(place.ends_with(&format!("t.jsonl, line {line}")), "{place}");
            }
            other => panic!("{damaged}: {other:?}"),
        }
        assert_eq!(fs::read_to_string(feed.path()).unwrap(), damaged);
    }
    fs::write(feed.path(), format!("{text}nonsense\n")).unwrap();
    assert!(matches!(feed.append("r", &["x"]), Err(RecordsError::Corrupt { .. })));
}

#[test]
fn a_removed_run_leaves_the_numbers_of_the_others_and_its_own_are_not_given_again() {
    let feed = Feed::new();
    for (run, text) in [("a", "1"), ("b", "2"), ("a", "3"), ("b", "4")] {
        feed.append(run, &[text]).unwrap();
    }
    let hold = || FeedFile::hold(feed.path(), "t".to_owned()).unwrap();
    hold().retain(|event| event.run_id != "b").unwrap();
    assert_eq!(feed.numbers(), [1, 3]);
    assert_eq!(feed.append("c", &["5"]).unwrap(), [5]);
    hold().retain(|_| false).unwrap();
    assert_eq!(feed.numbers(), [0_i64; 0]);
    assert_eq!(feed.append("c", &["6"]).unwrap(), [6]);
    hold().remove().unwrap();
    assert_eq!(feed.append("c", &["1"]).unwrap(), [1], "a deleted thread starts again");
}

/// A writer that waits for a file which is removed or replaced meanwhile does not write to the old one.
#[test]
fn a_writer_that_waits_writes_to_the_file_that_is_there() {
    let feed = Feed::new();
    feed.append("r", &["old"]).unwrap();
    for replace in [true, false] {
        let held = FeedFile::hold(feed.path(), "t".to_owned()).unwrap();
        std::thread::scope(|scope| {
            let (started, starts) = std::sync::mpsc::channel();
            let feed = &feed;
            let waiting = scope.spawn(move || {
                started.send(()).unwrap();
                feed.append("r", &["new"]).unwrap()
            });
            starts.recv().unwrap();
            if replace {
                held.retain(|_| true).unwrap();
            } else {
                held.remove().unwrap();
            }
            assert_eq!(waiting.join().unwrap(), if replace { [2] } else { [1] });
        });
        assert_eq!(feed.read().unwrap().last().unwrap().1, "new");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// With long lines and many appends, the end is found by reading backwards.
    #[test]
    fn numbers_go_on_whatever_the_sizes_are(sizes in prop::collection::vec((0_usize..40_000, 1_usize..3), 1..6)) {
        let feed = Feed::new();
        let mut next = 1;
        for (size, count) in sizes {
            let text = "x".repeat(size);
            let numbers = feed.append("r", &vec![text.as_str(); count]).unwrap();
            let expected: Vec<i64> = (next..).take(count).collect();
            next += i64::try_from(count).unwrap();
            prop_assert_eq!(numbers, expected);
        }
        prop_assert_eq!(feed.numbers(), (1..next).collect::<Vec<_>>());
    }
}
