//! What a power loss leaves of a directory.
//!
//! A disk keeps what was flushed. Of later writes, it may keep any sectors, and the one being written may be torn.
//! Bytes outside a write do not change (SQLite calls that powersafe overwrite and relies on it). A new length and a new
//! name are kept or lost independently.

use std::collections::BTreeMap;
use std::path::Path;

use rand::RngExt as _;
use rand::rngs::StdRng;

use crate::trace::Event;

/// The content of an image where a file grew and the sector there was lost, if not zeros.
const STALE: u8 = 0xa5;

/// A file: what is on disk, and the changes since.
#[derive(Debug, Clone, Default)]
struct File {
    durable: Vec<u8>,
    since: Vec<Change>,
}

#[derive(Debug, Clone)]
enum Change {
    Write { at: usize, bytes: Vec<u8> },
    Truncate(usize),
}

#[derive(Debug, Clone)]
enum Name {
    Create(String, usize),
    Delete(String),
}

/// The disk at one moment.
#[derive(Debug, Clone, Default)]
pub struct Disk {
    files: Vec<File>,
    names: BTreeMap<String, usize>,
    since: Vec<Name>,
    /// Changes of the work that have begun.
    pub began: usize,
    /// Changes of the work that were acknowledged as flushed.
    pub promised: usize,
}

/// How much of a file's unflushed changes an image keeps.
#[derive(Debug, Clone, Copy)]
enum Keeps {
    Nothing,
    All,
    /// Each sector with this probability, in percent.
    Some(u32),
    /// The first sectors, this many; the next one is torn.
    First(usize),
    /// All but the sector with this number, which is lost or torn.
    AllBut(usize),
}

impl Disk {
    /// Records what happened next.
    pub fn follow(&mut self, event: &Event) {
        match event {
            Event::Create { name, file } => {
                self.file(*file);
                self.since.push(Name::Create(name.clone(), *file));
            }
            Event::Delete { name } => self.since.push(Name::Delete(name.clone())),
            Event::Write { file, at, bytes } => {
                let at = usize::try_from(*at).unwrap_or(usize::MAX);
                self.file(*file).since.push(Change::Write { at, bytes: bytes.clone() });
            }
            Event::Truncate { file, length } => {
                let length = usize::try_from(*length).unwrap_or(usize::MAX);
                self.file(*file).since.push(Change::Truncate(length));
            }
            Event::Sync { file } => {
                let file = self.file(*file);
                for change in std::mem::take(&mut file.since) {
                    match change {
                        Change::Write { at, bytes } => put(&mut file.durable, at, &bytes, 0),
                        Change::Truncate(length) => file.durable.resize(length, 0),
                    }
                }
            }
            Event::SyncNames => {
                for name in std::mem::take(&mut self.since) {
                    rename(&mut self.names, name);
                }
            }
            Event::Began(n) => self.began = *n,
            Event::Promised(n) => self.promised = *n,
        }
    }

    fn file(&mut self, number: usize) -> &mut File {
        if self.files.len() <= number {
            self.files.resize_with(number + 1, File::default);
        }
        &mut self.files[number]
    }

    /// Whether anything could be lost now.
    pub fn is_settled(&self) -> bool {
        self.since.is_empty() && self.files.iter().all(|file| file.since.is_empty())
    }

    /// What a power loss leaves, for these random numbers: the files by name.
    pub fn image(&self, rng: &mut StdRng) -> BTreeMap<String, Vec<u8>> {
        let sector = if rng.random_bool(0.5) { 512 } else { 4096 };
        let mut names = self.names.clone();
        let all = rng.random_bool(0.6);
        for name in &self.since {
            if all || rng.random_bool(0.5) {
                rename(&mut names, name.clone());
            }
        }
        let files = names.into_iter().filter_map(|(name, number)| {
            let file = self.files.get(number)?;
            Some((name, file.after(sector, rng)))
        });
        files.collect()
    }
}

impl File {
    fn after(&self, sector: usize, rng: &mut StdRng) -> Vec<u8> {
        let pieces: usize = self.since.iter().map(|change| change.sectors(sector)).sum();
        let keeps = match rng.random_range(0..8) {
            0 => Keeps::Nothing,
            1 | 2 => Keeps::All,
            3 => Keeps::First(rng.random_range(0..=pieces)),
            4 => Keeps::AllBut(rng.random_range(0..=pieces)),
            _ => Keeps::Some([10, 50, 90][rng.random_range(0..3)]),
        };
        let hole = if rng.random_bool(0.25) { STALE } else { 0 };
        let mut image = self.durable.clone();
        let mut number = 0;
        for change in &self.since {
            match change {
                Change::Truncate(length) => {
                    if keeps.keep(number, rng) {
                        image.resize(*length, hole);
                    }
                    number += 1;
                }
                Change::Write { at, bytes } => {
                    let mut done = 0;
                    while done < bytes.len() {
                        let here = at + done;
                        let end = bytes.len().min(done + sector - here % sector);
                        let piece = &bytes[done..end];
                        if keeps.keep(number, rng) {
                            put(&mut image, here, piece, hole);
                        } else if keeps.tears(number, rng) {
                            // The head wrote the first part of it, or the last.
                            let cut = rng.random_range(0..=piece.len());
                            if rng.random_bool(0.5) {
                                put(&mut image, here, &piece[..cut], hole);
                            } else {
                                put(&mut image, here + cut, &piece[cut..], hole);
                            }
                        }
                        done = end;
                        number += 1;
                    }
                }
            }
        }
        image
    }
}

impl Change {
    fn sectors(&self, sector: usize) -> usize {
        match self {
            Self::Write { at, bytes } => (at % sector + bytes.len()).div_ceil(sector),
            Self::Truncate(_) => 1,
        }
    }
}

impl Keeps {
    fn keep(self, number: usize, rng: &mut StdRng) -> bool {
        match self {
            Self::Nothing => false,
            Self::All => true,
            Self::Some(chance) => rng.random_range(0..100) < chance,
            Self::First(count) => number < count,
            Self::AllBut(one) => number != one,
        }
    }

    fn tears(self, number: usize, rng: &mut StdRng) -> bool {
        match self {
            Self::Nothing | Self::All => false,
            Self::Some(_) => rng.random_bool(0.2),
            Self::First(count) => number == count,
            Self::AllBut(_) => rng.random_bool(0.7),
        }
    }
}

fn put(image: &mut Vec<u8>, at: usize, bytes: &[u8], hole: u8) {
    if bytes.is_empty() {
        return;
    }
    let end = at + bytes.len();
    if image.len() < end {
        image.resize(end, hole);
    }
    image[at..end].copy_from_slice(bytes);
}

fn rename(names: &mut BTreeMap<String, usize>, name: Name) {
    match name {
        Name::Create(name, file) => names.insert(name, file),
        Name::Delete(name) => names.remove(&name),
    };
}

/// Writes an image to a directory.
///
/// # Errors
/// Those of the file system.
pub fn write(image: &BTreeMap<String, Vec<u8>>, directory: &Path) -> std::io::Result<()> {
    image.iter().try_for_each(|(name, bytes)| std::fs::write(directory.join(name), bytes))
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    fn events() -> Vec<Event> {
        let write = |at, byte: u8| Event::Write { file: 0, at, bytes: vec![byte; 1024] };
        vec![
            Event::Create { name: "f".into(), file: 0 },
            write(0, 1),
            Event::Sync { file: 0 },
            Event::SyncNames,
            write(512, 2),
        ]
    }

    #[test]
    fn what_was_flushed_is_in_every_image_and_the_rest_is_in_some() {
        let mut disk = Disk::default();
        for event in events() {
            disk.follow(&event);
        }
        let mut rng = StdRng::seed_from_u64(1);
        let images: Vec<_> = (0..200).map(|_| disk.image(&mut rng)["f"].clone()).collect();
        assert!(images.iter().all(|image| image[..512] == [1; 512]), "outside the write");
        assert!(images.iter().all(|image| image[512..1024].iter().all(|byte| [1, 2].contains(byte))));
        for length in [1024, 1536] {
            assert!(images.iter().any(|image| image.len() == length), "an image of {length} bytes");
        }
        let torn = |image: &&Vec<u8>| image[512..1024].contains(&1) && image[512..1024].contains(&2);
        assert!(images.iter().any(|image| torn(&image)), "a torn sector");
    }

    #[test]
    fn a_name_that_is_not_flushed_may_be_lost() {
        let mut disk = Disk::default();
        for event in &events()[..3] {
            disk.follow(event);
        }
        let mut rng = StdRng::seed_from_u64(2);
        let images: Vec<_> = (0..50).map(|_| disk.image(&mut rng)).collect();
        assert!(images.iter().any(BTreeMap::is_empty));
        assert!(images.iter().any(|image| image.get("f").is_some_and(|file| *file == [1; 1024])));
        assert!(!disk.is_settled());
        disk.follow(&Event::SyncNames);
        assert!(disk.is_settled());
    }
}
