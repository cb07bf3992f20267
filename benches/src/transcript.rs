//! Seeded messages that look like transcripts of real agents.
//!
//! Sizes are log-normal: as compact JSON a median of 0.7 KB, 90 % below 5.2 KB, at most 63 KB, 2.4 KB on average. Texts
//! are prose with natural word frequencies, source code, logs, listings and JSON, with paths, numbers and hashes that
//! occur once. zstd -3 compresses a message to 0.40 of its size, and to 0.29 with a dictionary trained on other
//! threads. All threads share the vocabulary, so that a dictionary helps as much as it does with real threads.

use std::fmt::Write as _;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value as Json, json};

/// Words of the vocabulary; how much more often the frequent ones occur than under a plain power law; how often a word
/// is the usual successor of the one before. These three make texts as compressible as real ones.
const WORDS: usize = 2_000;
const SKEW: f64 = 1.8;
const PHRASES: f64 = 0.35;
/// The median size of a message and the spread of its logarithm.
const MEDIAN: f64 = 690.0;
const SPREAD: f64 = 1.62;
/// The largest message, as compact JSON.
const LARGEST: usize = 63 << 10;
/// The shortest text.
const SHORTEST: usize = 12;

/// The messages of one thread, in the order they are requested. The same seed yields the same messages.
pub struct Transcript {
    random: StdRng,
    words: Vec<String>,
    /// The last word's index in the vocabulary.
    last: usize,
    tokens: u64,
}

/// A kind of text.
#[derive(Debug, Clone, Copy)]
enum Text {
    Prose,
    Code,
    Log,
    Listing,
    Records,
}

impl Transcript {
    /// The thread with this seed.
    pub fn new(seed: u64) -> Self {
        Self { random: StdRng::seed_from_u64(seed), words: vocabulary(), last: 0, tokens: 0 }
    }

    /// A human message: prose, followed by something pasted if it is long.
    pub fn human(&mut self) -> Json {
        let id = self.uuid();
        let message = json!({"type": "human", "content": "", "id": id, "additional_kwargs": {}});
        self.filled(message, |this, size| this.mixed(size, 800))
    }

    /// A model's answer.
    pub fn ai(&mut self) -> Json {
        let message = self.of_model(json!([]), "stop");
        self.filled(message, |this, size| this.mixed(size, 1_500))
    }

    /// A model's message with `count` tool calls. [`Self::tool`] answers each.
    pub fn calls(&mut self, count: usize) -> Json {
        let calls = (0..count).map(|_| {
            let name =
                ["bash", "read_file", "write_file", "web_search", "ls"][self.random.random_range(0..5)];
            let args = json!({"description": self.prose(40), "path": self.path()});
            let id = format!("call_{}", self.letters(24));
            json!({"name": name, "args": args, "id": id, "type": "tool_call"})
        });
        let calls = calls.collect();
        let message = self.of_model(Json::Array(calls), "tool_calls");
        self.filled(message, |this, size| this.mixed(size, 1_500))
    }

    /// The result of one of the calls in `calls`.
    pub fn tool(&mut self, calls: &Json, index: usize) -> Json {
        let call = &calls["tool_calls"][index];
        let id = self.uuid();
        let message = json!({
            "type": "tool", "content": "", "id": id, "name": call["name"], "tool_call_id": call["id"], "status": "success",
        });
        self.filled(message, |this, size| {
            let kinds = [Text::Code, Text::Log, Text::Listing, Text::Records, Text::Prose];
            let kind = kinds[this.random.random_range(0..kinds.len())];
            this.text(kind, size)
        })
    }

    fn of_model(&mut self, calls: Json, reason: &str) -> Json {
        self.tokens += self.random.random_range(50..900_u64);
        let (input, output) = (self.tokens, self.random.random_range(20..900_u64));
        let id = format!("lc_run--{}", self.uuid());
        json!({
            "type": "ai", "content": "", "id": id, "tool_calls": calls,
            "usage_metadata": {"input_tokens": input, "output_tokens": output, "total_tokens": input + output},
            "response_metadata": {"finish_reason": reason, "model_name": "gpt-4.1-2025-04-14"},
        })
    }

    /// Draws a size and fills the message with text up to that size.
    fn filled(&mut self, mut message: Json, text: impl FnOnce(&mut Self, usize) -> String) -> Json {
        let frame = message.to_string().len();
        let size = self.size().saturating_sub(frame).max(SHORTEST);
        let mut text = text(self, size);
        // Quotes and line ends take two bytes in JSON.
        let escaped = text.bytes().filter(|byte| matches!(byte, b'"' | b'\n' | b'\\')).count();
        text.truncate(text.len().min(size).saturating_sub(escaped).max(SHORTEST));
        message["content"] = Json::String(text);
        message
    }

    /// A size by the Box-Muller transform.
    fn size(&mut self) -> usize {
        let (a, b): (f64, f64) = (self.random.random_range(1e-9..1.0), self.random.random());
        let normal = (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
        number(MEDIAN * (SPREAD * normal).exp()).min(LARGEST)
    }

    /// Prose for the first `lead` bytes, then blocks of other kinds.
    fn mixed(&mut self, size: usize, lead: usize) -> String {
        let mut text = self.prose(size.min(lead));
        while text.len() < size {
            let kinds = [Text::Code, Text::Log, Text::Listing, Text::Records, Text::Prose, Text::Prose];
            let kind = kinds[self.random.random_range(0..kinds.len())];
            let block = self.random.random_range(400..6_000).min(size - text.len());
            let block = self.text(kind, block);
            match kind {
                Text::Prose => text.push_str(&block),
                _ => _ = write!(text, "\n```\n{block}\n```\n"),
            }
        }
        text
    }

    fn text(&mut self, kind: Text, size: usize) -> String {
        match kind {
            Text::Prose => self.prose(size),
            Text::Code => self.lines(size, Self::code_line),
            Text::Log => self.lines(size, Self::log_line),
            Text::Listing => self.lines(size, Self::listing_line),
            Text::Records => self.lines(size, Self::record_line),
        }
    }

    fn prose(&mut self, size: usize) -> String {
        let mut text = String::with_capacity(size + 16);
        while text.len() < size {
            match self.random.random_range(0..40) {
                0 => _ = write!(text, "`{}` ", self.path()),
                1 => _ = write!(text, "{} ", self.random.random_range(0..5_000)),
                2 => text.push_str("\n- "),
                3 | 4 => text.push_str("\n\n"),
                5 => _ = write!(text, "**{}** ", self.word()),
                n => {
                    text.push_str(self.word());
                    text.push_str(if n < 10 { ". " } else { " " });
                }
            }
        }
        text.truncate(size);
        text
    }

    fn lines(&mut self, size: usize, line: impl Fn(&mut Self) -> String) -> String {
        let mut text = String::with_capacity(size + 100);
        while text.len() < size {
            text.push_str(&line(self));
            text.push('\n');
        }
        text.truncate(size);
        text
    }

    fn code_line(&mut self) -> String {
        let indent = " ".repeat(4 * self.random.random_range(0..4));
        let (a, b, c) = (self.name(), self.name(), self.name());
        let line = match self.random.random_range(0..7) {
            0 => format!("def {a}(self, {b}: str, {c}: int = {}) -> None:", self.random.random_range(0..100)),
            1 => format!("return {a}.{b}({c})"),
            2 => format!("if {a} is not None and {b} > {}:", self.random.random_range(0..1_000)),
            3 => format!("self.{a} = {b}[\"{c}\"]"),
            4 => format!("for {a} in {b}.{c}():"),
            5 => format!("# {}", self.prose(50)),
            _ => format!("{a} = await {b}.{c}(timeout={})", self.random.random_range(1..60)),
        };
        indent + &line
    }

    fn log_line(&mut self) -> String {
        let level = ["INFO", "INFO", "INFO", "WARNING", "ERROR", "DEBUG"][self.random.random_range(0..6)];
        let (h, m, s) = (
            self.random.random_range(0..24),
            self.random.random_range(0..60),
            self.random.random_range(0..60_000),
        );
        let (module, text) = (self.name(), self.prose(45));
        let time = format!("2025-11-{:02}T{h:02}:{m:02}:{:02}.{:03}Z", 1 + h, s / 1_000, s % 1_000);
        format!("{time} {level} app.{module} request={} {}", self.hex(12), text.replace('\n', " "))
    }

    fn listing_line(&mut self) -> String {
        let (size, day) = (self.random.random_range(40..200_000), self.random.random_range(1..29));
        format!(
            "-rw-r--r-- 1 agent agent {size:>8} Nov {day:>2} {:02}:{:02} {}",
            day % 24,
            day * 2,
            self.path()
        )
    }

    fn record_line(&mut self) -> String {
        let (name, title) = (self.name(), self.prose(60).replace(['\n', '"'], " "));
        let score = self.random.random_range(0..10_000);
        format!(
            "{{\"id\": \"{}\", \"kind\": \"{name}\", \"title\": \"{title}\", \"score\": 0.{score:04}, \"url\": \
             \"https://example.com/{}\"}},",
            self.hex(16),
            self.path()
        )
    }

    /// A word: frequent ones far more often than rare ones, and sometimes the usual successor of the last one.
    fn word(&mut self) -> &str {
        self.last = if self.random.random_bool(PHRASES) {
            (self.last * 31 + 7) % 1_000
        } else {
            let place: f64 = self.random.random();
            #[allow(clippy::cast_precision_loss, reason = "a few thousand")]
            let rank = number((WORDS as f64).powf(place.powf(SKEW)) - 1.0);
            rank.min(WORDS - 1)
        };
        &self.words[self.last]
    }

    fn name(&mut self) -> String {
        format!("{}_{}", self.word().to_owned(), self.word())
    }

    fn path(&mut self) -> String {
        let extension = ["py", "rs", "md", "json", "ts"][self.random.random_range(0..5)];
        let (a, b) = (self.word().to_owned(), self.word().to_owned());
        format!("/workspace/{a}/{b}_{}.{extension}", self.random.random_range(0..100))
    }

    fn uuid(&mut self) -> String {
        format!("{:032x}", self.random.random::<u128>())
    }

    fn hex(&mut self, digits: usize) -> String {
        self.uuid()[..digits].to_owned()
    }

    fn letters(&mut self, count: usize) -> String {
        (0..count).map(|_| char::from(self.random.random_range(b'a'..=b'z'))).collect()
    }
}

/// The words that all threads use; the most frequent ones come first and are short.
fn vocabulary() -> Vec<String> {
    let mut random = StdRng::seed_from_u64(1);
    let syllables = [
        "ra", "te", "mi", "con", "ver", "sa", "tion", "lo", "ed", "in", "pre", "gor", "um", "fi", "ness",
        "ing", "al", "thr", "ou", "be", "st", "ex", "ly", "qu", "ph", "ke", "de", "sh", "wa", "er", "nt",
        "os",
    ];
    let mut word = |rank: usize| {
        let parts = random.random_range(1..=1 + (rank + 10).ilog10().min(3));
        (0..parts).map(|_| syllables[random.random_range(0..syllables.len())]).collect::<String>()
    };
    (0..WORDS).map(&mut word).collect()
}

/// Rounds a positive number down.
fn number(value: f64) -> usize {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small and positive")]
    let number = value as usize;
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(seed: u64, messages: usize) -> Vec<String> {
        let mut transcript = Transcript::new(seed);
        let mut texts = Vec::new();
        while texts.len() < messages {
            let calls = transcript.calls(1);
            texts.extend(
                [transcript.human(), transcript.tool(&calls, 0), transcript.ai(), calls]
                    .map(|m| m.to_string()),
            );
        }
        texts
    }

    /// Four threads: a sample long enough to represent the generator.
    fn sample() -> Vec<String> {
        (0..4).flat_map(|seed| thread(seed, 1_000)).collect()
    }

    #[test]
    fn sizes_are_those_of_real_transcripts() {
        let mut sizes: Vec<usize> = sample().iter().map(String::len).collect();
        sizes.sort_unstable();
        let at = |part: usize| sizes[sizes.len() * part / 100];
        let mean = sizes.iter().sum::<usize>() / sizes.len();
        let found = (at(50), at(90), sizes[sizes.len() - 1], mean);
        assert!((650..=750).contains(&found.0), "{found:?}");
        assert!((4_900..=5_600).contains(&found.1), "{found:?}");
        assert!((60_000..=64_600).contains(&found.2), "{found:?}");
        assert!((2_250..=2_550).contains(&found.3), "{found:?}");
    }

    #[test]
    fn texts_compress_as_real_transcripts_do() {
        let messages = sample();
        let raw: usize = messages.iter().map(String::len).sum();
        let other: Vec<String> = (100..104).flat_map(|seed| thread(seed, 500)).collect();
        let dictionary = zstd::dict::from_samples(&other, 112 << 10).unwrap();
        let over = |mut compressor: zstd::bulk::Compressor<'_>| {
            let packed: usize =
                messages.iter().map(|m| compressor.compress(m.as_bytes()).unwrap().len()).sum();
            packed * 1000 / raw
        };
        let alone = over(zstd::bulk::Compressor::new(3).unwrap());
        let trained = over(zstd::bulk::Compressor::with_dictionary(3, &dictionary).unwrap());
        assert!((380..=420).contains(&alone), "{alone} {trained} of 1000");
        assert!((270..=310).contains(&trained), "{alone} {trained} of 1000");
    }

    #[test]
    fn a_seed_makes_the_same_messages_again_and_another_one_others() {
        assert_eq!(thread(7, 40), thread(7, 40));
        assert!(thread(7, 40).iter().zip(thread(8, 40)).all(|(a, b)| *a != b));
    }

    #[test]
    fn the_results_of_tools_name_the_calls_that_they_answer() {
        let mut transcript = Transcript::new(3);
        let calls = transcript.calls(2);
        for index in 0..2 {
            assert_eq!(transcript.tool(&calls, index)["tool_call_id"], calls["tool_calls"][index]["id"]);
        }
    }
}
