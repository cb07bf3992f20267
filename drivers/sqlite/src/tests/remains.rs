//! What is left of deleted threads is deleted in short transactions.

use threadkeep::saver::Saver;

use super::common::Talk;
use super::pieces::store;
use crate::SqliteSaver;

/// What a transaction of a deletion reads and writes does not grow with the number of namespaces.
#[tokio::test]
async fn no_transaction_grows_with_the_namespaces_of_a_deleted_thread() {
    let most = async |namespaces: usize| {
        let made = store(8);
        for number in 0..namespaces {
            let mut speaker = Talk { namespace: format!("n{number}").as_str().into(), ..Talk::new("t") };
            made.say(&mut speaker, number).await;
        }
        let saver = SqliteSaver::open(made.dir.path().join("db"), &made.options).unwrap();
        saver.delete_thread(&"t".into()).await.unwrap();
        assert_eq!(saver.check().await.unwrap(), []);
        saver.close().await;
        saver.stats().most_rows
    };
    let (few, many) = (most(60).await, most(300).await);
    assert!(few > 20 && many * 4 <= few * 5, "{few} rows in a transaction, then {many}");
}
