//! The stores of this program: in memory, in mode delta.

use std::path::Path;
use std::sync::Arc;

use threadkeep::mode::ChannelMode;
use threadkeep_memory::MemorySaver;
use threadkeep_records::{Records, RecordsOptions};

use crate::support::Stores;

pub(crate) async fn open(_: &Path, options: RecordsOptions) -> Stores {
    Stores {
        saver: Arc::new(MemorySaver::default()),
        records: Records::open_memory(options).await.unwrap(),
        mode: ChannelMode::Delta,
        database: None,
    }
}
