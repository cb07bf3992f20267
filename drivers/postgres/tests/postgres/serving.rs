//! Whether others work on a database: what a command asks between two threads.

use std::time::Duration;

use threadkeep_postgres::{Options, PostgresSaver};
use tokio_postgres::Client;
use url::Url;

use crate::common::damage::connect;
use crate::common::talk::Talk;
use crate::common::{database, open, patient};
use crate::servers::{append, has};

async fn command(url: &str) -> PostgresSaver {
    PostgresSaver::connect(url, Options { is_command: true, ..patient() }).await.unwrap()
}

/// Waits until the answer is this one.
async fn comes_to(command: &PostgresSaver, expected: bool) {
    while command.is_serving().await.unwrap() != expected {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn names(client: &Client) -> Vec<String> {
    let names = "SELECT DISTINCT application_name FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() ORDER BY 1";
    client.query(names, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn others_count_while_they_work_and_commands_never() {
    let database = database().await;
    let (one, two) = (command(database.url()).await, command(database.url()).await);
    // The tables were made a moment ago.
    comes_to(&one, false).await;
    let mut talk = Talk::new("t");
    append(&two, &mut talk, 0, 3).await;
    has(&one, &talk, 0..3).await;
    assert!(!one.is_serving().await.unwrap(), "commands do not wait for each other");

    let gateway = open(database.url()).await;
    append(&gateway, &mut talk, 3, 3).await;
    while !one.is_serving().await.unwrap() {
        has(&gateway, &talk, 0..6).await;
    }
    // Its connections are open and do nothing.
    comes_to(&one, false).await;

    let client = connect(database.url()).await;
    client.batch_execute("BEGIN").await.unwrap();
    comes_to(&one, true).await;
    assert!(two.is_serving().await.unwrap());
    client.batch_execute("ROLLBACK").await.unwrap();
    comes_to(&one, false).await;
    has(&gateway, &talk, 0..6).await;
}

/// A role may not be shown what sessions of another one do.
#[tokio::test(flavor = "multi_thread")]
async fn sessions_of_which_nothing_is_said_count() {
    let database = database().await;
    let client = connect(database.url()).await;
    let role = format!("{}_reader", database.name());
    client
        .batch_execute(&format!(
            "CREATE ROLE {role} LOGIN PASSWORD 'secret'; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}"
        ))
        .await
        .unwrap();
    let mut url = Url::parse(database.url()).unwrap();
    url.set_username(&role).unwrap();
    url.set_password(Some("secret")).unwrap();
    let (seeing, restricted) = (command(database.url()).await, command(url.as_str()).await);
    comes_to(&seeing, false).await;
    // The test's own session is open, and does nothing.
    assert!(restricted.is_serving().await.unwrap());
    drop(client);
    comes_to(&restricted, false).await;
    restricted.close();
    let client = connect(database.url()).await;
    client.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_is_named_in_the_list_of_sessions() {
    let database = database().await;
    let client = connect(database.url()).await;
    let joined = if database.url().contains('?') { '&' } else { '?' };
    let long = "n".repeat(80);
    for (of, expected) in [
        (String::new(), "threadkeep command".to_owned()),
        (format!("{joined}application_name=agents"), "agents command".to_owned()),
        (format!("{joined}application_name={long}"), format!("{} command", &long[..55])),
        // Of a letter of two bytes no half is left.
        (format!("{joined}application_name={}", "%C3%BC".repeat(40)), format!("{} command", "??".repeat(27))),
    ] {
        let saver = command(&format!("{}{of}", database.url())).await;
        saver.is_serving().await.unwrap();
        let found = names(&client).await;
        assert!(found.contains(&expected), "{found:?} {expected}");
        saver.close();
    }
}
