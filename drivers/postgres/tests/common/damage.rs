//! Damage that bypasses the saver. Rows are resealed as the driver's module `schema` describes, so that a loss looks
//! like a deletion and not like a flipped bit.

use threadkeep::checkpoint::CheckpointKey;
use threadkeep::id::CheckpointId;
use threadkeep_conformance::{BoxError, Damage};
use tokio_postgres::{Client, NoTls};
use uuid::Uuid;

/// A session of its own.
pub async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("the server answers");
    tokio::spawn(connection);
    client
}

/// The first sixteen bytes of a text's hash.
pub fn short_hash(text: &str) -> [u8; 16] {
    blake3::hash(text.as_bytes()).as_bytes()[..16].try_into().expect("sixteen bytes")
}

fn uuid(id: CheckpointId) -> Uuid {
    Uuid::from_bytes(*id.as_bytes())
}

/// The key of a checkpoint's row.
pub fn row_key(key: &CheckpointKey) -> (Uuid, Vec<u8>, Uuid) {
    let ns = match key.namespace.as_str() {
        "" => Vec::new(),
        text => short_hash(text).to_vec(),
    };
    (Uuid::from_bytes(short_hash(key.thread.as_str())), ns, uuid(key.id))
}

/// Inflicts `damage`.
pub async fn inflict(url: &str, damage: &Damage) -> Result<(), BoxError> {
    let client = connect(url).await;
    let row = "WHERE thread = $1 AND ns = $2 AND id = $3";
    let rows = match damage {
        Damage::LoseCheckpoint(key) => {
            let (thread, ns, id) = row_key(key);
            client.execute(&format!("DELETE FROM threadkeep_checkpoint {row}"), &[&thread, &ns, &id]).await?
        }
        Damage::LoseWrites(at, task) => {
            let (thread, ns, id) = row_key(at);
            let select = format!("SELECT tasks FROM threadkeep_checkpoint {row}");
            let tasks: Vec<u8> = client.query_one(&select, &[&thread, &ns, &id]).await?.get(0);
            // Its version, the number of tasks, and the id of the first.
            if tasks[1] != 1 || tasks[2..18] != task.as_bytes()[..] {
                return Err("the task is not alone under its checkpoint".into());
            }
            let lose = format!("UPDATE threadkeep_checkpoint SET tasks = NULL {row}");
            client.execute(&lose, &[&thread, &ns, &id]).await?
        }
        Damage::LoseParentLink(key) => lose_parent(&client, key).await?,
        Damage::ChangeByte(_) => {
            let byte = "octet_length(body) / 2";
            let flipped = format!("set_byte(body, {byte}, get_byte(body, {byte}) # 1)");
            // Nothing was removed, so the last row of the table is the newest.
            let newest = "(SELECT ctid FROM threadkeep_element ORDER BY ctid DESC LIMIT 1)";
            let change = format!("UPDATE threadkeep_element SET body = {flipped} WHERE ctid = {newest}");
            client.execute(&change, &[]).await?
        }
    };
    if rows == 1 { Ok(()) } else { Err(format!("{rows} rows: {damage:?}").into()) }
}

/// The bytes of all rows, without those that a vacuum has not removed yet.
#[allow(dead_code, reason = "only the conformance suite measures")]
pub async fn stored_bytes(url: &str) -> Result<u64, BoxError> {
    let client = connect(url).await;
    let sum =
        |columns: &str, table: &str| format!("(SELECT coalesce(sum({columns}), 0) FROM threadkeep_{table})");
    let rows = [
        sum("16 + octet_length(body)", "element"),
        sum("64 + octet_length(body) + coalesce(octet_length(tasks), 0)", "checkpoint"),
        sum("32 + octet_length(name) + octet_length(body)", "thread"),
    ];
    let bytes: i64 = client.query_one(&format!("SELECT ({})::bigint", rows.join(" + ")), &[]).await?.get(0);
    Ok(u64::try_from(bytes)?)
}

async fn lose_parent(client: &Client, key: &CheckpointKey) -> Result<u64, BoxError> {
    let (thread, ns, id) = row_key(key);
    let row = "WHERE thread = $1 AND ns = $2 AND id = $3";
    let select = format!("SELECT seed, names, extra, body FROM threadkeep_checkpoint {row}");
    let found = client.query_one(&select, &[&thread, &ns, &id]).await?;
    let (seed, names): (Option<Uuid>, i32) = (found.get(0), found.get(1));
    let (extra, mut body): (Option<i32>, Vec<u8>) = (found.get(2), found.get(3));
    body.truncate(body.len() - 4);

    let mut covered = blake3::Hasher::new();
    let mut cover = |column: &[u8]| {
        covered.update(&(column.len() as u64).to_le_bytes());
        covered.update(column);
    };
    cover(b"checkpoint");
    cover(thread.as_bytes());
    cover(&ns);
    cover(id.as_bytes());
    cover(&[0]);
    match seed {
        Some(seed) => {
            cover(&[1]);
            cover(seed.as_bytes());
        }
        None => cover(&[0]),
    }
    cover(&i64::from(names).to_le_bytes());
    match extra {
        Some(extra) => {
            cover(&[1]);
            cover(&i64::from(extra).to_le_bytes());
        }
        None => cover(&[0]),
    }
    covered.update(&body);
    body.extend_from_slice(&covered.finalize().as_bytes()[..4]);
    let lose = format!("UPDATE threadkeep_checkpoint SET parent = NULL, body = $4 {row}");
    Ok(client.execute(&lose, &[&thread, &ns, &id, &body]).await?)
}
