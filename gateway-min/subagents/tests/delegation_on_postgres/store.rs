//! The stores of this program: Postgres, in mode delta.

use std::path::Path;
use std::sync::Arc;

use threadkeep::mode::ChannelMode;
use threadkeep_postgres::{Address, Options, PostgresSaver};
use threadkeep_records::{PostgresTarget, Records, RecordsOptions};

use crate::support::Stores;

pub(crate) async fn open(_: &Path, options: RecordsOptions) -> Stores {
    let database = threadkeep_testing::postgres().unwrap().database().await.unwrap();
    threadkeep_postgres::setup(database.url(), &Options::default()).await.unwrap();
    let saver = PostgresSaver::connect(database.url(), Options::default()).await.unwrap();
    let opener = Address::parse(database.url()).unwrap().opener().unwrap();
    let target = PostgresTarget::new(opener, "Postgres".to_owned(), "public", 4);
    Stores {
        saver: Arc::new(saver),
        records: Records::open_postgres(&target, options).await.unwrap(),
        mode: ChannelMode::Delta,
        database: Some(database),
    }
}
