//! What a reader knows of the elements and lists of the lines before. It holds the latest ones, and where the others are.

use std::collections::HashMap;
use std::io::{Read, Seek};

use lru::LruCache;
use threadkeep::id::{ChannelName, Version};
use threadkeep::value::{Element, ListValue};

use super::format::{Append, ElementLine, Form, Line, Runs, hex};
use super::lines::{Lines, Spot};
use super::values::{bytes, version_of};

/// The most bytes of elements, and of lists that share none with them, that are held.
#[cfg(not(test))]
const BYTES: usize = 16 << 20;
#[cfg(test)]
const BYTES: usize = 16 << 10;
/// What an element takes besides its bytes.
const ELEMENT: usize = 192;
/// How many lists are held: a writer remembers no more. Files of earlier versions may extend older ones.
const LISTS: usize = if cfg!(test) { 8 } else { 128 };

/// The elements read so far, by channel or metadata map.
pub(super) struct Elements {
    of: HashMap<String, u32>,
    spots: Vec<Vec<Spot>>,
    latest: LruCache<(u32, u32), Element>,
    bytes: usize,
    /// Those that were read again for this checkpoint: its values share them, however often they repeat them.
    ours: HashMap<(u32, u32), Element>,
    /// The bytes of all that were read again.
    again: usize,
}

impl Elements {
    pub(super) fn new() -> Self {
        Self {
            of: HashMap::new(),
            spots: Vec::new(),
            latest: LruCache::unbounded(),
            bytes: 0,
            ours: HashMap::new(),
            again: 0,
        }
    }

    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.bytes
    }

    /// Begins with another checkpoint.
    pub(super) fn begin(&mut self) {
        self.ours.clear();
    }

    /// The bytes of all elements that were read again.
    pub(super) fn again(&self) -> usize {
        self.again
    }

    /// How many elements this has.
    pub(super) fn count(&self, of: &str) -> usize {
        self.of.get(of).and_then(|of| self.spots.get(*of as usize)).map_or(0, Vec::len)
    }

    /// Adds the element of this line.
    pub(super) fn add(&mut self, line: &ElementLine, spot: Spot) -> Result<(), String> {
        let of = if let Some(of) = self.of.get(&line.of) {
            *of
        } else {
            let of = u32::try_from(self.spots.len()).map_err(|_| "too many kinds of elements")?;
            self.spots.push(Vec::new());
            self.of.insert(line.of.clone(), of);
            of
        };
        let known = self.spots.get_mut(of as usize).ok_or("no such kind of elements")?;
        if line.n as usize != known.len() {
            return Err(format!("element {} of {} where {} is expected", line.n, line.of, known.len()));
        }
        let element = decoded(line)?;
        known.push(spot);
        self.hold((of, line.n), element);
        Ok(())
    }

    /// The elements of a run, which must have been read before.
    pub(super) fn run<R: Read + Seek>(
        &mut self,
        lines: &mut Lines<R>,
        of: &str,
        (start, count): (u32, u32),
    ) -> Result<Vec<Element>, String> {
        let (from, to) = (start as usize, start as usize + count as usize);
        let missing = || format!("elements {from} to {to} of {of} are missing");
        let number = *self.of.get(of).ok_or_else(missing)?;
        let spots = self.spots.get(number as usize).and_then(|spots| spots.get(from..to));
        // They are few: a list has no more elements than the reader allows.
        let spots = spots.ok_or_else(missing)?.to_vec();
        let mut elements = Vec::with_capacity(spots.len());
        for (n, spot) in (start..).zip(spots) {
            let key = (number, n);
            if let Some(element) = self.latest.get(&key).or_else(|| self.ours.get(&key)) {
                elements.push(element.clone());
                continue;
            }
            let element = match lines.again(spot)? {
                Line::Element(line) => decoded(&line)?,
                _ => return Err(missing()),
            };
            self.again += element.bytes().len() + ELEMENT;
            self.ours.insert(key, element.clone());
            self.hold(key, element.clone());
            elements.push(element);
        }
        Ok(elements)
    }

    fn hold(&mut self, key: (u32, u32), element: Element) {
        let weight = |element: &Element| element.bytes().len() + ELEMENT;
        self.bytes += weight(&element);
        if let Some(old) = self.latest.put(key, element) {
            self.bytes -= weight(&old);
        }
        while self.bytes > BYTES
            && let Some((_, old)) = self.latest.pop_lru()
        {
            self.bytes -= weight(&old);
        }
    }
}

fn decoded(line: &ElementLine) -> Result<Element, String> {
    let element = match &line.value {
        Form::Json(json) => Element::from_json(json).map_err(|error| error.to_string())?,
        Form::Msgpack(text) => Element::from_bytes(bytes(text)?),
        _ => return Err(format!("element {} of {} is neither json nor msgpack", line.n, line.of)),
    };
    if hex(element.hash()) != line.hash {
        return Err(format!("element {} of {} does not match its hash", line.n, line.of));
    }
    Ok(element)
}

/// The lists of a namespace.
pub(super) struct Lists {
    latest: LruCache<(ChannelName, Version), (ListValue, usize)>,
    /// The bytes of those that share no elements with others.
    bytes: usize,
    channels: HashMap<ChannelName, u32>,
    /// The line of each list.
    spots: HashMap<(u32, Version), Spot>,
}

impl Lists {
    pub(super) fn new() -> Self {
        Self { latest: LruCache::unbounded(), bytes: 0, channels: HashMap::new(), spots: HashMap::new() }
    }

    /// Forgets all of them: another namespace begins.
    pub(super) fn clear(&mut self) {
        *self = Self::new();
    }

    /// Adds a list, which was made while `again` bytes of elements were read again. Without a spot, it is the list that had
    /// the version before.
    pub(super) fn add(
        &mut self,
        channel: &ChannelName,
        version: Version,
        (list, again): (ListValue, usize),
        spot: Option<Spot>,
    ) {
        if let Some(spot) = spot {
            let next = u32::try_from(self.channels.len()).unwrap_or(u32::MAX);
            let number = *self.channels.entry(channel.clone()).or_insert(next);
            self.spots.insert((number, version), spot);
        }
        self.bytes += again;
        if let Some((_, old)) = self.latest.put((channel.clone(), version), (list, again)) {
            self.bytes -= old;
        }
        while self.latest.len() > LISTS || (self.bytes > BYTES && self.latest.len() > 1) {
            let Some((_, (_, old))) = self.latest.pop_lru() else { return };
            self.bytes -= old;
        }
    }

    fn spot(&self, channel: &ChannelName, version: Version) -> Option<Spot> {
        self.spots.get(&(*self.channels.get(channel)?, version)).copied()
    }

    /// A list from before this line, made again if it is not held.
    pub(super) fn get<R: Read + Seek>(
        &mut self,
        (lines, elements): (&mut Lines<R>, &mut Elements),
        channel: &ChannelName,
        version: Version,
    ) -> Result<ListValue, String> {
        let (mut at, mut before) = (version, lines.spot());
        let mut steps: Vec<Runs> = Vec::new();
        let again = elements.again;
        let mut list = loop {
            if let Some((list, _)) = self.latest.get(&(channel.clone(), at)) {
                break list.clone();
            }
            let spot = self.spot(channel, at).filter(|spot| spot.is_before(before));
            let spot = spot.ok_or_else(|| format!("channel {channel} has no list of version {at}"))?;
            match form_at(lines, spot, channel)? {
                Some(Form::List(runs)) => {
                    steps.push(runs);
                    break ListValue::default();
                }
                Some(Form::Append(Append { to, list })) => {
                    steps.push(list);
                    (at, before) = (version_of(&to)?, spot);
                }
                _ => return Err(format!("channel {channel} has no list of version {at}")),
            }
        };
        if steps.is_empty() {
            return Ok(list);
        }
        for run in steps.into_iter().rev().flatten() {
            for element in elements.run(lines, channel.as_str(), run)? {
                list.push(element);
            }
        }
        self.add(channel, version, (list.clone(), elements.again - again), None);
        Ok(list)
    }
}

/// The value of a channel in the line of a checkpoint.
fn form_at<R: Read + Seek>(
    lines: &mut Lines<R>,
    spot: Spot,
    channel: &ChannelName,
) -> Result<Option<Form>, String> {
    match lines.again(spot)? {
        Line::Checkpoint(mut line) => Ok(line.channels.remove(channel.as_str()).and_then(|part| part.value)),
        _ => Ok(None),
    }
}
