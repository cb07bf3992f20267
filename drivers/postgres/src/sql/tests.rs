use threadkeep_testing::postgres;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};
use uuid::Uuid;

use super::*;
use crate::config::Options;
use crate::function;
use crate::pool::Param;

/// The plan that a session keeps for a statement in a function; it does not depend on the arguments.
async fn kept_plan(client: &Client, options: &str, statement: &str, params: usize) -> String {
    let arguments = vec!["NULL"; params].join(", ");
    let explain = format!(
        "SET plan_cache_mode = force_generic_plan; PREPARE kept AS {statement};
         EXPLAIN {options} EXECUTE kept({arguments}); DEALLOCATE kept; RESET plan_cache_mode"
    );
    let messages = client.simple_query(&explain).await.unwrap();
    let line = |message| match message {
        SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap().to_owned() + "\n"),
        _ => None,
    };
    messages.into_iter().filter_map(line).collect()
}

async fn plan(client: &Client, statement: &str, params: &[Param<'_>]) -> String {
    let rows = client.query_typed(&format!("EXPLAIN (COSTS OFF) {statement}"), params).await.unwrap();
    rows.iter().map(|row| row.get::<_, String>(0) + "\n").collect()
}

/// However large the tables are, rows are found by key: nothing is scanned, filtered or sorted.
#[tokio::test]
async fn reads_go_by_keys() {
    let database = postgres().unwrap().database().await.unwrap();
    crate::setup(database.url(), &Options::patient()).await.unwrap();
    let (client, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    // Otherwise small tables are scanned.
    client.batch_execute("SET enable_seqscan = off; SET enable_bitmapscan = off").await.unwrap();
    let sql = Sql::new("public");
    let (thread, ns, id, limit) =
        (Uuid::from_bytes([1; 16]), Vec::<u8>::new(), Uuid::from_bytes([2; 16]), 10_i64);
    let (thread, ns): (Param<'_>, Param<'_>) = ((&thread, Type::UUID), (&ns, Type::BYTEA));
    let (id, limit): (Param<'_>, Param<'_>) = ((&id, Type::UUID), (&limit, Type::INT8));
    let numbers = vec![1_i64 << 33];
    let beyond: [Param<'_>; 5] = [
        (&1_i64, Type::INT8),
        (&2_i64, Type::INT8),
        (&35_i64, Type::INT8),
        (&numbers, Type::INT8_ARRAY),
        (&numbers, Type::INT8_ARRAY),
    ];
    let key = "(thread = '01010101-0101-0101-0101-010101010101'::uuid)";
    let chain = format!("{key} AND (ns = '\\x'::bytea)");
    let by_id = "'02020202-0202-0202-0202-020202020202'::uuid";
    let by_key = |name: &str, plan: &str, cond: &str| {
        assert!(plan.contains(cond), "{name}: {cond}\n{plan}");
        assert!(!plan.contains("Seq Scan") && !plan.contains("Sort"), "{name}:\n{plan}");
    };
    let ends = vec![7_i64, 1 << 32, 1 << 33];
    let copied = [thread.clone(), id.clone(), (&3_i64, Type::INT8), (&ends, Type::INT8_ARRAY), limit.clone()];
    by_key(
        "copied elements",
        &plan(&client, &sql.copy_elements, &copied).await,
        &format!("{key} AND (seq >= '3'"),
    );
    by_key("rows", &plan(&client, &sql.rows, std::slice::from_ref(&thread)).await, "(thread = '01010101");
    for (name, statement) in [("a whole thread", &sql.all), ("its outlines", &sql.outlines)] {
        let whole = plan(&client, statement, std::slice::from_ref(&thread)).await;
        by_key(name, &whole, &format!("{key} AND (seq >= '4294967296'"));
        by_key(name, &whole, &format!("on threadkeep_checkpoint c\n              Index Cond: {key}"));
    }
    let page = plan(&client, &sql.newest, &[thread.clone(), ns.clone(), id.clone(), ns.clone(), limit]).await;
    by_key("an old page", &page, &format!("{chain} AND (id <= {by_id})"));
    for (name, statement, params, cond) in [
        ("head", function::head("public"), vec![thread.clone(), ns.clone()], "(thread = $1) AND (ns = $2)"),
        (
            "by id",
            function::by_id("public"),
            vec![thread.clone(), ns.clone(), id.clone()],
            "(thread = $1) AND (ns = $2) AND (id = $3)",
        ),
        (
            "head beyond",
            function::head_beyond("public"),
            [&[thread.clone(), ns.clone()][..], &beyond].concat(),
            "(thread = $1) AND (ns = $2)",
        ),
        (
            "by id beyond",
            function::by_id_beyond("public"),
            [&[thread.clone(), ns.clone(), id.clone()][..], &beyond].concat(),
            "(thread = $1) AND (ns = $2) AND (id = $3)",
        ),
        (
            "a lineage",
            function::lineage("public"),
            vec![thread.clone(), ns.clone(), id.clone(), id.clone()],
            "(ns = $2) AND (id < w.id) AND (id = w.parent)",
        ),
    ] {
        by_key(name, &kept_plan(&client, "(COSTS OFF)", &statement, params.len()).await, cond);
        // The plans for the first calls of a session are made for their arguments.
        let first = plan(&client, &statement, &params).await;
        let values =
            [("$1", "'01010101-0101-0101-0101-010101010101'::uuid"), ("$2", "'\\x'::bytea"), ("$3", by_id)];
        let cond = values.iter().fold(cond.to_owned(), |cond, (param, value)| cond.replace(param, value));
        by_key(name, &first, &cond);
    }
    let (ids, next) = (vec![Uuid::from_bytes([2; 16])], vec![1_i64, 1 << 32, 2 << 32]);
    let look: Vec<Param<'_>> =
        vec![thread.clone(), ns, (&ids, Type::UUID_ARRAY), (&1_i64, Type::INT8), (&next, Type::INT8_ARRAY)];
    let mut below = look.clone();
    below.push(id.clone());
    let below = plan(&client, &sql.look_below, &below).await;
    assert!(!below.contains("Seq Scan"), "{below}");
    assert!(below.contains(&format!("{chain} AND (id > {by_id})")), "{below}");
    let look = plan(&client, &sql.look, &look).await;
    assert!(!look.contains("Seq Scan"), "{look}");
    assert!(look.contains("AND (seq >= CASE WHEN ("), "{look}");
    let bounds = vec![1_i64];
    let params = [thread, (&bounds, Type::INT8_ARRAY), (&bounds, Type::INT8_ARRAY)];
    let elements = plan(&client, &sql.elements, &params).await;
    assert!(elements.contains("(seq >= w.first) AND (seq <= w.last)"), "{elements}");
    let after = vec![b'a'];
    let params: [Param<'_>; 2] = [(&after, Type::BYTEA), (&10_i64, Type::INT8)];
    let threads = plan(&client, &sql.threads, &params).await;
    assert!(threads.contains("Index Scan using threadkeep_thread_name"), "{threads}");
    assert!(threads.contains("Incremental Sort"), "{threads}");
}

/// A session keeps the plans of the writing function, made when the tables were as small as these.
#[tokio::test]
async fn writes_go_by_keys_with_plans_from_when_the_tables_were_small() {
    let database = postgres().unwrap().database().await.unwrap();
    crate::setup(database.url(), &Options::patient()).await.unwrap();
    let (client, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let key = "01010101-0101-0101-0101-010101010101";
    let write = |from: Option<i64>| {
        let old = from.map_or("NULL, NULL, NULL".to_owned(), |revision| format!("1, {revision}, '{key}'"));
        let to = from.map_or(0, |revision| revision + 1);
        format!(
            "SELECT threadkeep_write('{key}', '', {old}, 1, {to}, '{key}', '', true, ARRAY[{to}], ARRAY['{key}'::uuid], ARRAY[NULL::int],
                 ARRAY[''::bytea], ARRAY[''::bytea], ARRAY['{key}'::uuid], ARRAY['{key}'::uuid], ARRAY['{key}'::uuid], ARRAY[0],
                 ARRAY[0], ARRAY['{{1,2}}'], ARRAY[''::bytea], ARRAY[''::bytea],
                 ARRAY[''::bytea], ARRAY['{key}'::uuid], ARRAY[''::bytea], ARRAY[''::bytea])"
        )
    };
    assert!(client.query_one(&write(None), &[]).await.unwrap().get::<_, bool>(0));
    client.batch_execute("VACUUM ANALYZE").await.unwrap();
    client.batch_execute("BEGIN").await.unwrap();
    for revision in 0..12 {
        assert!(client.query_one(&write(Some(revision)), &[]).await.unwrap().get::<_, bool>(0));
        assert!(!client.query_one(&write(Some(revision)), &[]).await.unwrap().get::<_, bool>(0));
    }
    let scans = "SELECT relname::text, seq_scan, idx_scan FROM pg_stat_xact_user_tables
                 WHERE relname NOT IN ('threadkeep_format', 'threadkeep_grave') ORDER BY 1";
    for table in client.query(scans, &[]).await.unwrap() {
        assert_eq!(table.get::<_, i64>(1), 0, "{table:?}");
        // Elements are only added.
        assert_eq!(
            table.get::<_, i64>(2) > 0,
            table.get::<_, String>(0) != "threadkeep_element",
            "{table:?}"
        );
    }
}

/// A statement that the planner considers costly is compiled first, which takes far longer than running it.
#[tokio::test]
async fn no_read_of_a_long_thread_looks_costly() {
    let database = postgres().unwrap().database().await.unwrap();
    crate::setup(database.url(), &Options::patient()).await.unwrap();
    let (client, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
    tokio::spawn(connection);
    let fill = "INSERT INTO threadkeep_checkpoint (thread, ns, id, names, body)
                SELECT '01010101-0101-0101-0101-010101010101', '', encode(int8send(n) || int8send(n), 'hex')::uuid, 0, ''
                FROM generate_series(1, 10000) n; ANALYZE";
    client.batch_execute(fill).await.unwrap();
    let sql = Sql::new("public");
    let (thread, ns, id) = (Uuid::from_bytes([1; 16]), Vec::<u8>::new(), Uuid::from_bytes([0; 16]));
    let (nothing, no_id, no_limit) = (None::<Vec<u8>>, None::<Uuid>, None::<i64>);
    let (thread, ns): (Param<'_>, Param<'_>) = ((&thread, Type::UUID), (&ns, Type::BYTEA));
    let id: Param<'_> = (&id, Type::UUID);
    let numbers = vec![1_i64 << 33];
    let beyond: [Param<'_>; 5] = [
        (&1_i64, Type::INT8),
        (&2_i64, Type::INT8),
        (&35_i64, Type::INT8),
        (&numbers, Type::INT8_ARRAY),
        (&numbers, Type::INT8_ARRAY),
    ];
    let everything: Vec<Param<'_>> = vec![
        thread.clone(),
        (&nothing, Type::BYTEA),
        (&no_id, Type::UUID),
        (&nothing, Type::BYTEA),
        (&no_limit, Type::INT8),
    ];
    let cheap = |name: &str, first: &str| {
        let cost = first.split_once("..").unwrap().1.split_once(' ').unwrap().0;
        assert!(cost.parse::<f64>().unwrap() < 50_000.0, "{name}: {first}");
    };
    for (name, statement, params) in [
        ("list", sql.newest.text, everything),
        ("lineage", function::lineage("public"), vec![thread.clone(), ns.clone(), id.clone(), id]),
        ("head", function::head("public"), vec![thread.clone(), ns.clone()]),
        ("head beyond", function::head_beyond("public"), [&[thread, ns][..], &beyond].concat()),
    ] {
        let rows = client.query_typed(&format!("EXPLAIN {statement}"), &params).await.unwrap();
        cheap(name, rows[0].get(0));
        if name != "list" {
            cheap(name, &kept_plan(&client, "", &statement, params.len()).await);
        }
    }
}
