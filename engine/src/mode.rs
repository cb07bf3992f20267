//! The channel mode: freezing it per process, injecting its marker, and the gate that keeps a `full` process away from
//! delta checkpoints.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use serde_json::{Map, Value as Json};

use crate::checkpoint::CheckpointTuple;
use crate::error::{CADENCE_RECONFIGURATION, Error, FREQUENCY_NOT_POSITIVE, MODE_RECONFIGURATION, Result};
use crate::metadata::Metadata;

/// Default cadence: updates between two snapshots (service reference, "Marker constants").
pub const DEFAULT_SNAPSHOT_FREQUENCY: u64 = 10;
/// The `configurable` key of a run configuration that names the mode (service reference, "Marker constants").
pub const INTERNAL_CHECKPOINT_MODE_KEY: &str = "__svc_checkpoint_channel_mode";
/// The checkpoint metadata key of the delta marker (service reference, "Marker constants").
pub const CHECKPOINT_MODE_METADATA_KEY: &str = "svc_checkpoint_channel_mode";

/// How accumulating channels are stored (service reference, "What the service does" 2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChannelMode {
    /// Every checkpoint refers to the complete value.
    Full,
    /// A sentinel and the writes of each step; a complete snapshot when the cadence is due.
    Delta,
}

impl ChannelMode {
    /// The text of the setting.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Delta => "delta",
        }
    }
}

impl fmt::Display for ChannelMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ChannelMode {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "full" => Ok(Self::Full),
            "delta" => Ok(Self::Delta),
            other => Err(Error::InvalidInput(format!(
                "checkpoint_channel_mode must be 'full' or 'delta', not '{other}'"
            ))),
        }
    }
}

/// The mode and cadence of a process: set once, then fixed until it ends
/// (service reference, "Mode and cadence freezing").
#[derive(Debug, Default)]
pub struct ModeRegister {
    frozen: Mutex<Frozen>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Frozen {
    mode: Option<ChannelMode>,
    frequency: Option<u64>,
}

impl ModeRegister {
    /// A register in which nothing is frozen.
    pub const fn new() -> Self {
        Self { frozen: Mutex::new(Frozen { mode: None, frequency: None }) }
    }

    /// The register of this process.
    pub fn process() -> &'static Arc<Self> {
        static PROCESS: LazyLock<Arc<ModeRegister>> = LazyLock::new(Arc::default);
        &PROCESS
    }

    fn with<T>(&self, change: impl FnOnce(&mut Frozen) -> T) -> T {
        change(&mut self.frozen.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Freezes the mode. Freezing the same mode again has no effect.
    ///
    /// # Errors
    /// [`Error::Reconfiguration`] if another mode is frozen; it stays.
    pub fn freeze_mode(&self, mode: ChannelMode) -> Result<()> {
        self.with(|frozen| match frozen.mode {
            Some(old) if old != mode => Err(Error::Reconfiguration(MODE_RECONFIGURATION)),
            _ => {
                frozen.mode = Some(mode);
                Ok(())
            }
        })
    }

    /// Freezes the cadence. Freezing the same cadence again has no effect. The value is signed so that a caller that
    /// bypassed validation gets the reference's error.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for a value below one, [`Error::Reconfiguration`] if another one is frozen; it stays.
    pub fn freeze_frequency(&self, frequency: i64) -> Result<()> {
        let frequency = positive(frequency)?;
        self.with(|frozen| match frozen.frequency {
            Some(old) if old != frequency => Err(Error::Reconfiguration(CADENCE_RECONFIGURATION)),
            _ => {
                frozen.frequency = Some(frequency);
                Ok(())
            }
        })
    }

    /// The frozen mode.
    pub fn mode(&self) -> Option<ChannelMode> {
        self.with(|frozen| frozen.mode)
    }

    /// The cadence to use: the explicit one, else the frozen one, else 10.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for an explicit value below one.
    pub fn frequency(&self, explicit: Option<i64>) -> Result<u64> {
        match explicit {
            Some(value) => positive(value),
            None => Ok(self.with(|frozen| frozen.frequency).unwrap_or(DEFAULT_SNAPSHOT_FREQUENCY)),
        }
    }
}

fn positive(frequency: i64) -> Result<u64> {
    u64::try_from(frequency)
        .ok()
        .filter(|n| *n > 0)
        .ok_or_else(|| Error::InvalidInput(FREQUENCY_NOT_POSITIVE.to_owned()))
}

/// Injects the mode into a run configuration: `configurable` always names it; `metadata` carries the marker in delta
/// mode and has it removed in full mode (service reference, "Marker constants").
pub fn inject(mode: ChannelMode, config: &mut Map<String, Json>) {
    edit_section(config, "configurable", |section| {
        section.insert(INTERNAL_CHECKPOINT_MODE_KEY.into(), mode.as_str().into());
    });
    edit_section(config, "metadata", |section| match mode {
        ChannelMode::Delta => {
            section.insert(CHECKPOINT_MODE_METADATA_KEY.into(), mode.as_str().into());
        }
        ChannelMode::Full => {
            section.remove(CHECKPOINT_MODE_METADATA_KEY);
        }
    });
}

fn edit_section(config: &mut Map<String, Json>, key: &str, edit: impl FnOnce(&mut Map<String, Json>)) {
    let mut section = match config.remove(key) {
        Some(Json::Object(section)) => section,
        _ => Map::new(),
    };
    edit(&mut section);
    config.insert(key.into(), Json::Object(section));
}

/// The gate on a checkpoint's metadata, as a snapshot read and the pre-write check apply it.
///
/// # Errors
/// [`Error::ModeMismatch`] if the process is in full mode and the checkpoint in delta mode; a delta process accepts
/// both (service reference, "Compatibility gate").
pub fn gate(mode: ChannelMode, metadata: &Metadata) -> Result<()> {
    match mode {
        ChannelMode::Full if metadata.is_delta() => Err(Error::ModeMismatch),
        _ => Ok(()),
    }
}

/// The gate on a raw checkpoint tuple. A missing tuple passes.
///
/// # Errors
/// As [`gate`].
pub fn gate_tuple(mode: ChannelMode, tuple: Option<&CheckpointTuple>) -> Result<()> {
    tuple.map_or(Ok(()), |tuple| gate(mode, &tuple.metadata))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::metadata::{Counters, Source};

    #[test]
    fn freezing_the_mode_follows_the_reference_table() {
        let register = ModeRegister::new();
        assert_eq!(register.mode(), None);
        register.freeze_mode(ChannelMode::Delta).unwrap();
        register.freeze_mode(ChannelMode::Delta).unwrap();
        let error = register.freeze_mode(ChannelMode::Full).unwrap_err();
        assert_eq!(
            error.to_string(),
            "checkpoint_channel_mode is restart-required and cannot change in a running process"
        );
        assert_eq!(error.class_name(), "CheckpointModeReconfigurationError");
        assert_eq!(register.mode(), Some(ChannelMode::Delta));
    }

    #[test]
    fn freezing_the_cadence_follows_the_reference_table() {
        let register = ModeRegister::new();
        for bad in [0, -1, i64::MIN] {
            assert_eq!(
                register.freeze_frequency(bad).unwrap_err().to_string(),
                "snapshot frequency must be positive"
            );
            assert_eq!(register.frequency(None).unwrap(), 10, "a refused value freezes nothing");
        }
        register.freeze_frequency(25).unwrap();
        register.freeze_frequency(25).unwrap();
        assert_eq!(
            register.freeze_frequency(26).unwrap_err().to_string(),
            "checkpoint_delta.snapshot_frequency is restart-required and cannot change in a running process"
        );
        assert_eq!(
            register.freeze_frequency(0).unwrap_err().to_string(),
            "snapshot frequency must be positive"
        );
        assert_eq!(register.frequency(None).unwrap(), 25);
    }

    #[test]
    fn the_cadence_is_the_explicit_one_then_the_frozen_one_then_ten() {
        let register = ModeRegister::new();
        assert_eq!(register.frequency(None).unwrap(), 10);
        assert_eq!(register.frequency(Some(3)).unwrap(), 3);
        register.freeze_frequency(7).unwrap();
        assert_eq!(register.frequency(None).unwrap(), 7);
        assert_eq!(register.frequency(Some(3)).unwrap(), 3);
        assert!(register.frequency(Some(0)).is_err());
    }

    #[test]
    fn injection_names_the_mode_and_sets_or_removes_the_marker() {
        let mut config = json!({"metadata": {"svc_checkpoint_channel_mode": "delta", "a": 1}});
        let map = config.as_object_mut().unwrap();
        inject(ChannelMode::Full, map);
        assert_eq!(
            Json::Object(map.clone()),
            json!({"configurable": {"__svc_checkpoint_channel_mode": "full"}, "metadata": {"a": 1}})
        );
        inject(ChannelMode::Delta, map);
        assert_eq!(
            Json::Object(map.clone()),
            json!({"configurable": {"__svc_checkpoint_channel_mode": "delta"},
                   "metadata": {"a": 1, "svc_checkpoint_channel_mode": "delta"}})
        );
    }

    #[test]
    fn the_gate_refuses_a_full_process_a_delta_checkpoint_and_nothing_else() {
        let plain = Metadata::new(Source::Loop, 0);
        let mut marked = plain.clone();
        marked.delta_marker = true;
        let mut counted = plain.clone();
        counted.counters.insert("messages".into(), Counters { updates: 1, supersteps: 1 });
        let mut both = marked.clone();
        both.counters = counted.counters.clone();
        for delta in [&marked, &counted, &both] {
            let error = gate(ChannelMode::Full, delta).unwrap_err();
            assert_eq!(
                error.to_string(),
                "Thread requires delta mode; materialize and convert its checkpoints before using full mode."
            );
            assert_eq!(error.class_name(), "CheckpointModeMismatchError");
            gate(ChannelMode::Delta, delta).unwrap();
        }
        gate(ChannelMode::Full, &plain).unwrap();
        gate(ChannelMode::Delta, &plain).unwrap();
        gate_tuple(ChannelMode::Full, None).unwrap();
    }

    #[test]
    fn a_mode_outside_the_two_is_refused() {
        assert_eq!("full".parse::<ChannelMode>().unwrap(), ChannelMode::Full);
        assert_eq!("delta".parse::<ChannelMode>().unwrap(), ChannelMode::Delta);
        assert!("Delta".parse::<ChannelMode>().is_err());
    }
}
