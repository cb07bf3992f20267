//! Reading the frames of a streamed answer.

use axum::body::{Body, BodyDataStream};
use axum::http::Response;
use futures::StreamExt as _;
use serde_json::Value;

/// One frame.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Frame {
    pub(crate) name: String,
    pub(crate) data: Value,
    pub(crate) id: Option<String>,
}

/// The frames of an answer, as they come.
pub(crate) struct Frames {
    body: BodyDataStream,
    text: String,
}

impl Frames {
    pub(crate) fn of(answer: Response<Body>) -> Self {
        assert_eq!(answer.status(), 200);
        Self { body: answer.into_body().into_data_stream(), text: String::new() }
    }

    /// The next frame; none after the end of the answer.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some((frame, rest)) = self.text.split_once("\n\n") {
                let (frame, rest) = (parse(frame), rest.to_owned());
                self.text = rest;
                return Some(frame);
            }
            let Some(bytes) = self.body.next().await else {
                assert_eq!(self.text, "", "half a frame");
                return None;
            };
            self.text.push_str(std::str::from_utf8(&bytes.unwrap()).unwrap());
        }
    }

    /// Reads up to the first frame of this name, and returns it.
    pub(crate) async fn until(&mut self, name: &str) -> Frame {
        loop {
            let frame = self.next().await.unwrap_or_else(|| panic!("no frame {name}"));
            if frame.name == name {
                return frame;
            }
        }
    }

    /// All further frames.
    pub(crate) async fn rest(mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        while let Some(frame) = self.next().await {
            frames.push(frame);
        }
        frames
    }
}

/// The frames of an answer, read to its end.
pub(crate) async fn all(answer: Response<Body>) -> Vec<Frame> {
    Frames::of(answer).rest().await
}

/// The names of the frames.
pub(crate) fn names(frames: &[Frame]) -> Vec<&str> {
    frames.iter().map(|frame| frame.name.as_str()).collect()
}

/// The lines of a frame: exactly `event`, `data` and at most an `id`, after heartbeats.
fn parse(text: &str) -> Frame {
    let lines: Vec<&str> = text.lines().skip_while(|line| *line == ": heartbeat").collect();
    let (head, id) = match lines[..] {
        [event, data] => ([event, data], None),
        [event, data, id] => ([event, data], Some(id.strip_prefix("id: ").unwrap().to_owned())),
        _ => panic!("not a frame: {text}"),
    };
    Frame {
        name: head[0].strip_prefix("event: ").unwrap().to_owned(),
        data: serde_json::from_str(head[1].strip_prefix("data: ").unwrap()).unwrap(),
        id,
    }
}
