//! Setup and connecting warn of server settings with which acknowledged commits can be lost or damage hidden.

use threadkeep_postgres::{PostgresSaver, setup};
use threadkeep_testing::{Log, postgres};
use tracing::instrument::WithSubscriber as _;

use crate::common::damage::connect;
use crate::common::patient;

/// The settings that were warned of while `work` ran.
async fn warned(work: impl Future<Output = ()>) -> Vec<String> {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
    work.with_subscriber(subscriber).await;
    let setting = |line: &str| {
        let (_, rest) = line.split_once("WARN")?.1.split_once("the server has ")?;
        let (setting, consequence) = rest.split_once(": ")?;
        assert!(consequence.len() > 20, "{line}");
        Some(setting.to_owned())
    };
    log.text().lines().filter_map(setting).collect()
}

#[tokio::test]
async fn a_server_that_may_lose_what_it_acknowledged_is_warned_of() {
    let database = postgres().unwrap().database().await.unwrap();
    let url = database.url();
    let client = connect(url).await;
    let setting = async |name: &str| {
        let row = client.query_one(&format!("SELECT current_setting('{name}')"), &[]).await.unwrap();
        format!("{name}={}", row.get::<_, &str>(0))
    };
    for synchronous in ["on", "local", "off"] {
        let alter = format!("ALTER DATABASE {} SET synchronous_commit = {synchronous}", database.name());
        client.batch_execute(&alter).await.unwrap();
        // What this server has: a private one of the tests flushes nothing, and has page checksums.
        let mut expected = Vec::new();
        for name in ["fsync", "full_page_writes"] {
            expected.extend(Some(setting(name).await).filter(|setting| setting.ends_with("=off")));
        }
        if synchronous != "on" {
            expected.push(format!("synchronous_commit={synchronous}"));
        }
        expected.extend(Some(setting("data_checksums").await).filter(|setting| setting.ends_with("=off")));
        let on_setup = warned(async { setup(url, &patient()).await.unwrap() }).await;
        assert_eq!(on_setup, expected);
        let on_connect = warned(async {
            PostgresSaver::connect(url, patient()).await.unwrap();
        });
        assert_eq!(on_connect.await, expected);
    }
}
