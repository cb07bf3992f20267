//! The stores of this program: SQLite, in mode full.

use std::path::Path;
use std::sync::Arc;

use threadkeep::mode::ChannelMode;
use threadkeep_records::{DATABASE_FILE, Records, RecordsOptions};
use threadkeep_sqlite::{Options, SqliteSaver};

use crate::support::Stores;

pub(crate) async fn open(directory: &Path, options: RecordsOptions) -> Stores {
    let checkpoints = directory.join("checkpoints.db");
    Stores {
        saver: Arc::new(SqliteSaver::open_async(checkpoints, Options::default()).await.unwrap()),
        records: Records::open(&directory.join(DATABASE_FILE), options).await.unwrap(),
        mode: ChannelMode::Full,
        database: None,
    }
}
