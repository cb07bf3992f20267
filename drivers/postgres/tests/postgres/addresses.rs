//! What an address says: certificates, passwords, hosts.

use std::time::Duration;

use threadkeep::Error;
use threadkeep::saver::{CheckpointSelector, Saver};
use threadkeep_postgres::{Options, PostgresSaver, setup};
use threadkeep_testing::Postgres;
use url::Url;

use crate::common::damage::connect;
use crate::common::talk::Talk;
use crate::common::{database, open, open_impatient, patient};
use crate::servers::append;

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_encrypted_and_the_certificate_is_checked() {
    let server = Postgres::start().unwrap();
    let database = server.database().await.unwrap();
    let trusting = format!(
        "{}?sslmode=verify-full&sslrootcert={}",
        database.url(),
        server.certificate().unwrap().display()
    );
    setup(&trusting, &patient()).await.unwrap();
    let saver = open(&trusting).await;
    append(&saver, &mut Talk::new("t"), 0, 3).await;
    let encrypted = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)
                     WHERE application_name = 'threadkeep' AND ssl = $1";
    let client = connect(database.url()).await;
    let sessions = async |ssl: bool| client.query_one(encrypted, &[&ssl]).await.unwrap().get::<_, i64>(0);
    assert!(sessions(true).await > 0);
    assert_eq!(sessions(false).await, 0);

    // Without the certificate the server is untrusted; without a demand, TLS is used where it is offered.
    let doubting = format!("{}?sslmode=require", database.url());
    let options = Options { patience: Duration::ZERO, ..Options::default() };
    let error = PostgresSaver::connect(&doubting, options).await.unwrap_err();
    assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains("certificate")), "{error}");
    drop(saver);
    let closed = async {
        while sessions(true).await > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_mins(10), closed).await.expect("its sessions stay");
    let _preferred = open(database.url()).await;
    assert!(sessions(true).await > 0);
    assert_eq!(sessions(false).await, 0);
    let _plain = open(&format!("{}?sslmode=disable", database.url())).await;
    assert!(sessions(false).await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_address_lacks_is_named() {
    let server = Postgres::start().unwrap();
    let refused = async |address: &Url| {
        let options = Options { patience: Duration::ZERO, ..Options::default() };
        PostgresSaver::connect(address.as_str(), options).await.unwrap_err().to_string()
    };
    let mut address = Url::parse(&server.url("postgres")).unwrap();
    address.set_query(Some("sslmode=require"));
    let error = refused(&address).await;
    assert!(error.contains("sslrootcert"), "{error}");
    address.set_query(None);
    address.set_password(None).unwrap();
    let error = refused(&address).await;
    assert!(error.contains("PGPASSWORD"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_in_no_text() {
    let database = database().await;
    let url = Url::parse(database.url()).unwrap();
    let password = url.password().unwrap();
    let saver = open_impatient(database.url()).await;
    let mut texts = vec![format!("{saver:?}")];
    saver.close();
    texts.push(saver.get(&CheckpointSelector::head(&"t".into())).await.unwrap_err().to_string());
    let mut wrong = url.clone();
    wrong.set_username("nobody_known").unwrap();
    let options = Options { patience: Duration::ZERO, ..Options::default() };
    let refused = PostgresSaver::connect(wrong.as_str(), options.clone()).await.unwrap_err();
    assert!(matches!(refused, Error::Unavailable { .. }));
    texts.push(format!("{refused} {refused:?}"));
    let mut nowhere = url.clone();
    nowhere.set_port(Some(1)).unwrap();
    let refused = PostgresSaver::connect(nowhere.as_str(), options).await.unwrap_err();
    texts.push(format!("{refused} {refused:?}"));
    for text in texts {
        assert!(!text.contains(password), "{text}");
    }
}
