//! Sessions of a server, with and without TLS, and of a pooler.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::saver::{CheckpointSelector, Saver};
use threadkeep_testing::{Postgres, pgbouncer, postgres};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;
use crate::config::{Address, Options, Target};
use crate::connect::Connector;
use crate::pool::Connections;
use crate::{PostgresSaver, setup};

async fn session(address: &str) -> Session {
    let Target { config, tls } = Target::parse(address, Duration::ZERO).unwrap();
    Session::of(Connector::new(tls).open(&config).await.unwrap()).await.unwrap()
}

/// What is prepared in the session that answers.
async fn prepared(session: &Session) -> Vec<String> {
    let rows = session.client.query_typed("SELECT statement FROM pg_prepared_statements", &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test]
async fn a_server_gives_each_connection_a_session_of_its_own_and_a_pooler_does_not() {
    let server = Postgres::start().unwrap();
    let database = server.database().await.unwrap();
    let certificate = server.certificate().unwrap().display().to_string();
    let trusted = format!("?sslmode=require&sslrootcert={certificate}");
    for more in ["", "?sslmode=prefer", "?sslmode=disable", &trusted] {
        let session = session(&format!("{}{more}", database.url())).await;
        assert!(session.is_own, "{more}");
        let process = session.client.query_typed_one(PROCESS, &[]).await.unwrap().get::<_, i32>(0);
        assert_eq!(announced(&session.client).await, Some(process), "{more}");
    }
    // Nobody else uses this pooler's sessions: two connections would not notice that they share them.
    let database = postgres().unwrap().database().await.unwrap();
    let session = session(&pgbouncer().unwrap().url(&database)).await;
    assert!(!session.is_own);
}

#[tokio::test]
async fn calls_stay_prepared_in_a_session_of_its_own_only() {
    let database = postgres().unwrap().database().await.unwrap();
    let call = Statement::call("SELECT pg_catalog.abs($1)".to_owned());
    for (url, is_own) in [(database.url().to_owned(), true), (pgbouncer().unwrap().url(&database), false)] {
        let session = session(&url).await;
        for n in [-7_i32, 7, -7] {
            let rows = session.query(&call, &[(&n, Type::INT4)]).await.unwrap();
            assert_eq!(rows[0].get::<_, i32>(0), 7);
        }
        let expected = if is_own { vec![call.to_string()] } else { Vec::new() };
        assert_eq!(prepared(&session).await, expected);
    }
}

/// What a session had prepared is gone, as after the server or a pooler between has reset it: nothing of the call was
/// carried out, and it is done on another connection.
#[tokio::test]
async fn a_prepared_statement_that_is_gone_is_asked_on_another_connection() {
    let database = postgres().unwrap().database().await.unwrap();
    let options = Options::patient();
    setup(database.url(), &options).await.unwrap();
    let target = Target::parse(database.url(), options.patience).unwrap();
    let connections = Connections::new(target, &options).unwrap();
    let call = Statement::call("SELECT pg_catalog.abs($1)".to_owned());
    for reset in ["DISCARD ALL", "DEALLOCATE ALL"] {
        let mut lease = connections.lease().await.unwrap();
        lease.query(&call, &[(&7_i32, Type::INT4)]).await.unwrap();
        lease.run(async |client| Ok(client.batch_execute(reset).await?)).await.unwrap();
        match lease.query(&call, &[(&7_i32, Type::INT4)]).await {
            Err(Trouble::Again { in_doubt: false, renew: true, reason }) => {
                assert!(reason.contains("26000"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        drop(lease);
        connections.renew();
    }

    let saver = PostgresSaver::connect(database.url(), options).await.unwrap();
    let (thread, process) = (ThreadId::from("t"), Statement::call(PROCESS.to_owned()));
    let read = async || saver.get(&CheckpointSelector::head(&thread)).await;
    let used = async || {
        let mut lease = saver.store.connections.lease().await.unwrap();
        lease.query(&process, &[]).await.map(|rows| rows[0].get::<_, i32>(0))
    };
    assert_eq!(read().await, Ok(None));
    let before = used().await.unwrap();
    let mut lease = saver.store.connections.lease().await.unwrap();
    lease.run(async |client| Ok(client.batch_execute("DISCARD ALL").await?)).await.unwrap();
    drop(lease);
    assert_eq!(read().await, Ok::<_, Error>(None));
    assert_ne!(used().await.unwrap(), before);
}

/// A server that accepts every client, and answers no statement, as a pooler without a free session. Returns its address, how
/// many clients are connected, and how many there were.
async fn mute() -> (String, Arc<[AtomicUsize; 2]>) {
    // The client is who it says, and may ask.
    const WELCOME: &[u8] = b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I";
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let place = listener.local_addr().unwrap().to_string();
    let counts = Arc::<[AtomicUsize; 2]>::default();
    let shared = counts.clone();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            for count in &*shared {
                count.fetch_add(1, Ordering::SeqCst);
            }
            let shared = shared.clone();
            tokio::spawn(async move {
                client.write_all(WELCOME).await.unwrap();
                let mut heard = [0; 1024];
                while client.read(&mut heard).await.is_ok_and(|bytes| bytes > 0) {}
                shared[0].fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
    (place, counts)
}

#[tokio::test]
async fn an_attempt_to_connect_that_is_given_up_leaves_no_connection_open() {
    let patience = Duration::from_millis(300);
    let options = Options { patience, ..Options::default() };
    let (one, counts) = mute().await;
    let address = |hosts: &str| format!("postgres://u@{hosts}/d?sslmode=disable");
    let mut attempts = 0;
    for (address, servers) in [(address(&one), 1), (address(&format!("{one},{one}")), 2)] {
        let connections = Connections::new(Target::parse(&address, patience).unwrap(), &options).unwrap();
        for _ in 0..5 {
            assert!(matches!(connections.lease().await, Err(Trouble::Again { in_doubt: false, .. })));
            connections.probe(connections.server(), patience).await;
        }
        assert!(setup(&address, &options).await.is_err());
        let opener = Address::parse(&address).unwrap().opener().unwrap();
        assert!(tokio::time::timeout(patience, opener(None)).await.is_err(), "it was opened");
        // Each attempt had one at each server, where the last ones may not be accepted yet.
        attempts += 12 * servers;
        let closed = async {
            while counts[1].load(Ordering::SeqCst) < attempts || counts[0].load(Ordering::SeqCst) > 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_mins(10), closed).await.expect("a connection stays open");
    }
    assert!(counts[1].load(Ordering::SeqCst) >= 3 * 12, "{counts:?}");
}
