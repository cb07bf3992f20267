//! Upgrades a configuration file to the newest schema (service reference, "Versioning"): adds every key that only the
//! example file has, moves the deprecated cadence key, and sets the version.
//!
//! The text is edited, not rewritten, so comments and layout stay; new keys bring the example's comments. Before
//! anything is written, the result is parsed and compared with what it should mean.

mod edit;
mod outline;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use self::edit::{Edits, Example};
use self::outline::{Mapping, Style, outline};
use super::database::{CADENCE_KEY, DELTA_KEY, FLAT_CADENCE_KEY, SECTION};
use super::error::ConfigError;
use super::find::Location;
use super::interpolate::joined;
use super::version::{CONFIG_VERSION_KEY, stated_version};
use super::{LoadOptions, yaml};
use threadkeep_files as files;

/// The example file of this build.
pub(super) const EXAMPLE: &str = include_str!("../../../../config.example.yaml");
/// The permissions of a newly created file: it may come to hold secrets.
const MODE: u32 = 0o600;
/// Sections and keys of the example that came after files of its version were made. The reference fixes the version, so
/// comparing versions does not find them.
const ADDED_WITHIN_VERSION: [(&str, &str); 1] = [("subagent_runtime", "hooks")];

/// The result of [`upgrade`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Upgrade {
    /// The file was missing and now holds the example.
    Created {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: i64,
    },
    /// The file is as new as the example, and is unchanged.
    UpToDate {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: i64,
    },
    /// The file was changed.
    Upgraded {
        /// The file.
        path: PathBuf,
        /// A copy of the old file, next to it.
        backup: PathBuf,
        /// The version before and after.
        versions: (i64, i64),
        /// The dotted paths of the keys that were added, in the order of the example.
        added: Vec<String>,
        /// Whether the deprecated cadence key was moved to its place, or dropped because that was taken.
        cadence: Option<Cadence>,
    },
}

/// What happened to `database.checkpoint_delta_snapshot_frequency`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cadence {
    /// Its value is now at `database.checkpoint_delta.snapshot_frequency`.
    Moved,
    /// That key was set, and wins as it did before.
    Dropped,
}

/// Why a file was not upgraded. It is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum UpgradeError {
    /// Finding or reading it.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Writing it or its backup.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// The file's layout cannot be edited without changing its meaning.
    #[error(
        "{} has a layout that cannot be edited safely (for example anchors); nothing was changed. Add by hand \
         what it lacks: {}", path.display(), added.join(", ")
    )]
    Layout {
        /// The file.
        path: PathBuf,
        /// The keys that it lacks.
        added: Vec<String>,
    },
    /// Another process changed it meanwhile.
    #[error("{} was changed while it was upgraded; try again", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
}

/// Upgrades the configuration file: the named one, else that of the project root, which is created if missing. Blocks.
///
/// # Errors
/// [`UpgradeError`]; the file is then unchanged.
pub fn upgrade(options: &LoadOptions) -> Result<Upgrade, UpgradeError> {
    let location = Location::of(options)?;
    let Some(path) = location.config_file()? else {
        let path = location.default_file();
        let version = stated_version(&yaml::parse(EXAMPLE, &path)?);
        files::replace(&path, EXAMPLE.as_bytes(), MODE).map_err(|source| write_failed(&path, source))?;
        return Ok(Upgrade::Created { path, version });
    };
    // Keep a symbolic link; replace what it points to.
    let unreadable = |source| ConfigError::Unreadable { path: path.clone(), source };
    let path = fs::canonicalize(&path).map_err(unreadable)?;
    let text = read(&path)?;
    match upgraded(&text, EXAMPLE, &path)? {
        None => Ok(Upgrade::UpToDate { version: stated_version(&yaml::parse(&text, &path)?), path }),
        Some(new) => write(path, &text, new),
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    fs::read_to_string(path).map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })
}

fn write(path: PathBuf, old: &str, new: Upgraded) -> Result<Upgrade, UpgradeError> {
    let backup = path.with_added_extension("bak");
    let mode = mode(&path);
    files::replace(&backup, old.as_bytes(), mode).map_err(|source| write_failed(&backup, source))?;
    if read(&path)? != old {
        return Err(UpgradeError::Changed { path });
    }
    files::replace(&path, new.text.as_bytes(), mode).map_err(|source| write_failed(&path, source))?;
    let Upgraded { versions, added, cadence, .. } = new;
    Ok(Upgrade::Upgraded { path, backup, versions, added, cadence })
}

fn write_failed(path: &Path, source: io::Error) -> UpgradeError {
    UpgradeError::Write { path: path.to_owned(), source }
}

fn mode(path: &Path) -> u32 {
    #[cfg(unix)]
    if let Ok(metadata) = fs::metadata(path) {
        use std::os::unix::fs::PermissionsExt as _;
        return metadata.permissions().mode() & 0o7777;
    }
    let _ = path;
    MODE
}

/// A new text, and what changed in it.
#[derive(Debug)]
struct Upgraded {
    text: String,
    versions: (i64, i64),
    added: Vec<String>,
    cadence: Option<Cadence>,
}

/// The text upgraded to the example; `None` if it has a newer version, or the same one and lacks nothing of
/// [`ADDED_WITHIN_VERSION`].
fn upgraded(text: &str, example: &str, path: &Path) -> Result<Option<Upgraded>, UpgradeError> {
    let mut meant = yaml::parse(text, path)?;
    let mut wanted = yaml::parse(example, path)?;
    let versions = (stated_version(&meant), stated_version(&wanted));
    if versions.0 > versions.1 {
        return Ok(None);
    }
    let is_older = versions.0 < versions.1;
    if !is_older {
        wanted = added_within_version(&meant, &wanted);
    }
    let (mut moved, mut cadence) = (Some(text.to_owned()), None);
    if is_older {
        moved = with_moved_cadence(text, &meant, path)?;
        cadence = move_cadence(&mut meant);
    }
    let mut added = Vec::new();
    add_missing(&mut meant, &wanted, "", &mut added);
    if !is_older && added.is_empty() {
        return Ok(None);
    }
    meant.insert(CONFIG_VERSION_KEY.to_owned(), versions.1.into());

    let new = moved.map(|text| with_missing(&text, example, &wanted, path)).transpose();
    // An edit of an unsupported layout may not even be valid YAML.
    let new = new.ok().flatten().filter(|text| yaml::parse(text, path).is_ok_and(|values| values == meant));
    match new {
        Some(text) => Ok(Some(Upgraded { text, versions, added, cadence })),
        None => Err(UpgradeError::Layout { path: path.to_owned(), added }),
    }
}

/// The part of the example that a file of its version may lack: the late keys of the sections that the file has.
fn added_within_version(values: &Map<String, Value>, example: &Map<String, Value>) -> Map<String, Value> {
    let mut part: Map<String, Value> = Map::new();
    for (section, key) in ADDED_WITHIN_VERSION {
        let Some(value) = example.get(section).and_then(|of| of.get(key)) else { continue };
        if values.get(section).is_some_and(Value::is_object) {
            part.entry(section).or_insert_with(|| Value::Object(Map::new()))[key] = value.clone();
        }
    }
    part
}

fn outline_of(text: &str, path: &Path) -> Result<Option<Mapping>, ConfigError> {
    outline(text).map_err(|error| ConfigError::Syntax { path: path.to_owned(), detail: error.to_string() })
}

/// Moves the cadence in the values as loading does.
fn move_cadence(values: &mut Map<String, Value>) -> Option<Cadence> {
    let Some(Value::Object(database)) = values.get_mut(SECTION) else { return None };
    if database.get(FLAT_CADENCE_KEY)?.is_null() {
        return None;
    }
    let delta = database.get(DELTA_KEY);
    if delta.is_some_and(|delta| !delta.is_null() && !delta.is_object()) {
        return None;
    }
    let flat = database.remove(FLAT_CADENCE_KEY)?;
    let delta = database.entry(DELTA_KEY).or_insert(Value::Null);
    if delta.is_null() {
        *delta = Value::Object(Map::new());
    }
    let nested = delta.as_object_mut()?.entry(CADENCE_KEY).or_insert(Value::Null);
    if nested.is_null() {
        *nested = flat;
        Some(Cadence::Moved)
    } else {
        Some(Cadence::Dropped)
    }
}

/// Adds what `wanted` has and `values` lacks, recursively. Existing values stay.
fn add_missing(
    values: &mut Map<String, Value>,
    wanted: &Map<String, Value>,
    path: &str,
    added: &mut Vec<String>,
) {
    for (key, value) in wanted {
        let path = joined(path, key);
        match (values.get_mut(key), value) {
            (None, value) => {
                values.insert(key.clone(), value.clone());
                added.push(path);
            }
            (Some(Value::Object(values)), Value::Object(wanted)) => add_missing(values, wanted, &path, added),
            (Some(_), _) => {}
        }
    }
}

/// The text with the cadence moved, as [`move_cadence`] does it for the values; `None` if its layout is not supported.
fn with_moved_cadence(
    text: &str,
    values: &Map<String, Value>,
    path: &Path,
) -> Result<Option<String>, ConfigError> {
    if move_cadence(&mut values.clone()).is_none() {
        return Ok(Some(text.to_owned()));
    }
    let top = outline_of(text, path)?;
    let database = top.as_ref().and_then(|top| top.entry(SECTION)?.mapping());
    let Some((database, flat)) = database.and_then(|of| Some((of, of.entry(FLAT_CADENCE_KEY)?))) else {
        return Ok(None);
    };
    let mut edits = Edits::new(text);
    let Some(delta) = database.entry(DELTA_KEY) else {
        edits.nest(database, flat, DELTA_KEY, CADENCE_KEY);
        return Ok(Some(edits.apply()));
    };
    let Some(cadence) = edits.value(flat).map(str::to_owned) else { return Ok(None) };
    let nested = values[SECTION][DELTA_KEY].as_object();
    match (delta.mapping(), nested.and_then(|nested| nested.get(CADENCE_KEY))) {
        (None, _) => edits.set(delta, &format!("{{{CADENCE_KEY}: {cadence}}}")),
        (Some(mapping), None) => edits.add(mapping, CADENCE_KEY, &cadence),
        (Some(mapping), Some(Value::Null)) => {
            let Some(nested) = mapping.entry(CADENCE_KEY) else { return Ok(None) };
            edits.set(nested, &cadence);
        }
        // Already set.
        (Some(_), Some(_)) => {}
    }
    edits.remove(database, flat);
    Ok(Some(edits.apply()))
}

/// The text with the keys it lacks from the example, and the example's version.
fn with_missing(
    text: &str,
    example: &str,
    wanted: &Map<String, Value>,
    path: &Path,
) -> Result<String, ConfigError> {
    let empty = || Mapping { style: Style::Block { indent: 0 }, entries: Vec::new() };
    let values = yaml::parse(text, path)?;
    let top = outline_of(text, path)?.unwrap_or_else(empty);
    let model = outline_of(example, path)?.unwrap_or_else(empty);
    let mut edits = Edits::new(text);
    if let (Some(old), Some(new)) = (top.entry(CONFIG_VERSION_KEY), wanted.get(CONFIG_VERSION_KEY)) {
        edits.set(old, &new.to_string());
    }
    Example { text: example, values: wanted, outline: &model }.add_missing(&mut edits, &top, &values, true);
    Ok(edits.apply())
}

#[cfg(test)]
mod tests;
