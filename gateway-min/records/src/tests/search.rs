use proptest::prelude::*;
use serde_json::{Number, Value, json};

use super::support::*;
use crate::*;

fn query() -> ThreadQuery {
    ThreadQuery { limit: 100, ..ThreadQuery::default() }
}

fn filter(metadata: Value) -> ThreadQuery {
    ThreadQuery { metadata: MetadataFilter::parse(&object(metadata)).unwrap(), ..query() }
}

async fn ids(records: &Records, query: &ThreadQuery) -> Vec<String> {
    records.threads().search(query).await.unwrap().into_iter().map(|row| row.thread_id).collect()
}

async fn create(records: &Records, thread_id: &str, metadata: Value) {
    let new =
        NewThread { thread_id: thread_id.to_owned(), metadata: object(metadata), ..NewThread::default() };
    assert!(records.threads().create(new).await.unwrap().created);
}

#[tokio::test]
async fn pinned_then_updated_then_id() {
    let fixture = fixture().await;
    let records = &fixture.records;
    for thread_id in ["a", "b", "c", "d", "e"] {
        create(records, thread_id, json!({})).await;
    }
    fixture.clock.advance_micros(1);
    records.threads().set_status("c", ThreadStatus::Idle).await.unwrap();
    records.threads().patch_metadata("a", None, object(json!({ PINNED_KEY: true }))).await.unwrap();
    // Only `true` pins.
    records.threads().patch_metadata("b", None, object(json!({ PINNED_KEY: "true" }))).await.unwrap();
    assert_eq!(ids(records, &query()).await, ["a", "c", "e", "d", "b"]);

    records.threads().patch_metadata("a", None, object(json!({ PINNED_KEY: false }))).await.unwrap();
    assert_eq!(ids(records, &query()).await, ["c", "e", "d", "b", "a"]);
    create(records, "0", json!({ PINNED_KEY: true })).await;
    assert_eq!(ids(records, &query()).await, ["0", "c", "e", "d", "b", "a"]);
}

#[tokio::test]
async fn pages_are_disjoint_and_complete() {
    let fixture = fixture().await;
    for i in 0..7 {
        create(&fixture.records, &format!("t{i}"), json!({})).await;
    }
    let page = |offset| ThreadQuery { limit: 3, offset, ..query() };
    assert_eq!(ids(&fixture.records, &page(0)).await, ["t6", "t5", "t4"]);
    let titles = fixture.records.threads().titles(&page(0)).await.unwrap();
    assert_eq!(titles, ["t6", "t5", "t4"].map(|id| (id.to_owned(), None)));
    assert_eq!(ids(&fixture.records, &page(3)).await, ["t3", "t2", "t1"]);
    assert_eq!(ids(&fixture.records, &page(6)).await, ["t0"]);
    assert_eq!(ids(&fixture.records, &page(7)).await, [""; 0]);
    assert_eq!(ids(&fixture.records, &page(u64::MAX)).await, [""; 0]);
}

#[tokio::test]
async fn status_ids_and_owner_narrow_the_search() {
    let fixture = fixture().await;
    let records = &fixture.records;
    for (thread_id, owner) in
        [("ann1", Some("ann")), ("ann2", Some("ann")), ("bob1", Some("bob")), ("free", None)]
    {
        let new = NewThread {
            thread_id: thread_id.to_owned(),
            user_id: owner.map(str::to_owned),
            ..NewThread::default()
        };
        records.threads().create(new).await.unwrap();
    }
    let ann = ThreadQuery { owner: Some("ann".to_owned()), ..query() };
    assert_eq!(ids(records, &ann).await, ["free", "ann2", "ann1"]);
    assert_eq!(ids(records, &query()).await, ["free", "bob1", "ann2", "ann1"]);

    let some = |ids: &[&str]| Some(ids.iter().map(|id| (*id).to_owned()).collect());
    let by_id = ThreadQuery { ids: some(&["bob1", "free", "unknown", "x' OR '1'='1"]), ..ann.clone() };
    assert_eq!(ids(records, &by_id).await, ["free"]);
    assert_eq!(ids(records, &ThreadQuery { ids: some(&[]), ..query() }).await, [""; 0]);
    let many: Vec<String> = (0..100_000).map(|i| format!("no{i}")).chain(["bob1".to_owned()]).collect();
    assert_eq!(ids(records, &ThreadQuery { ids: Some(many), ..query() }).await, ["bob1"]);

    records.threads().set_status("ann1", ThreadStatus::Error).await.unwrap();
    assert_eq!(
        ids(records, &ThreadQuery { status: Some(ThreadStatus::Error), ..ann.clone() }).await,
        ["ann1"]
    );
    assert_eq!(ids(records, &ThreadQuery { status: Some(ThreadStatus::Running), ..ann }).await, [""; 0]);
}

/// Metadata that fits whatever the others have is there in any case, and larger metadata while it fits.
#[tokio::test]
async fn metadata_beyond_the_limit_in_bytes_is_left_out() {
    let fixture = fixture().await;
    let records = &fixture.records;
    for (thread_id, length) in [("a", 400), ("b", 10), ("c", 400), ("d", 600)] {
        create(records, thread_id, json!({"of": thread_id, "text": "x".repeat(length)})).await;
    }
    for (limit, metadata_bytes, expected) in [
        (100, None, vec!["d", "c", "b", "a"]),
        (100, Some(100_000), vec!["d", "c", "b", "a"]),
        (100, Some(1_000), vec!["d", "b"]),
        (4, Some(1_000), vec!["d", "b"]),
        (4, Some(500), vec!["c", "b"]),
        (4, Some(0), vec![]),
    ] {
        let query = ThreadQuery { limit, metadata_bytes, ..query() };
        let rows = records.threads().search(&query).await.unwrap();
        assert_eq!(rows.iter().map(|row| row.thread_id.as_str()).collect::<Vec<_>>(), ["d", "c", "b", "a"]);
        let (without, with): (Vec<_>, Vec<_>) =
            rows.iter().partition(|row| row.metadata.contains_key(METADATA_OMITTED_KEY));
        let with: Vec<_> = with.iter().map(|row| row.metadata["of"].as_str().unwrap()).collect();
        assert_eq!(with, expected, "{limit}, {metadata_bytes:?}");
        let omitted = object(json!({ METADATA_OMITTED_KEY: true }));
        assert!(without.iter().all(|row| row.metadata == omitted), "{limit}, {metadata_bytes:?}");
    }
}

#[tokio::test]
async fn filters_match_value_and_type() {
    let fixture = fixture().await;
    let values = [
        ("null", json!(null)),
        ("true", json!(true)),
        ("false", json!(false)),
        ("int", json!(1)),
        ("zero", json!(0)),
        ("float", json!(1.5)),
        ("whole", json!(1.0)),
        ("text", json!("1")),
        ("empty", json!("")),
        ("big", json!(i64::MAX)),
        ("small", json!(i64::MIN)),
        ("object", json!({"a": 1})),
        ("list", json!([1])),
        ("quote", json!("a\"b\\c\u{0}\u{1f}é\u{2028}")),
    ];
    for (thread_id, value) in &values {
        create(&fixture.records, thread_id, json!({ "k": value })).await;
    }
    create(&fixture.records, "absent", json!({"other": 1})).await;
    for (value, expected) in [
        (json!(null), vec!["null"]),
        (json!(true), vec!["true"]),
        (json!(false), vec!["false"]),
        (json!(1), vec!["int"]),
        (json!(1.0), vec!["whole", "int"]),
        (json!(-0.0), vec!["zero"]),
        (json!(1.5), vec!["float"]),
        (json!("1"), vec!["text"]),
        (json!(""), vec!["empty"]),
        (json!("true"), vec![]),
        (json!("null"), vec![]),
        (json!(i64::MAX), vec!["big"]),
        (json!(i64::MIN), vec!["small"]),
        (json!("a\"b\\c\u{0}\u{1f}é\u{2028}"), vec!["quote"]),
        (json!("%"), vec![]),
        (json!(2), vec![]),
    ] {
        assert_eq!(ids(&fixture.records, &filter(json!({ "k": value }))).await, expected, "{value}");
    }
}

#[tokio::test]
async fn all_filters_must_match_and_keys_are_plain_names() {
    let fixture = fixture().await;
    create(&fixture.records, "a", json!({"x-1": "v", "0_y": 2})).await;
    create(&fixture.records, "b", json!({"x-1": "v", "0_y": 3})).await;
    create(&fixture.records, "nested", json!({"x": {"y": 1}, "x.y": 2})).await;
    assert_eq!(ids(&fixture.records, &filter(json!({"x-1": "v"}))).await, ["b", "a"]);
    assert_eq!(ids(&fixture.records, &filter(json!({"x-1": "v", "0_y": 3}))).await, ["b"]);
    assert_eq!(ids(&fixture.records, &filter(json!({}))).await, ["nested", "b", "a"]);
    let most: JsonObject = (0..FILTER_MAX_KEYS).map(|i| (format!("k{i}"), json!(i))).collect();
    create(&fixture.records, "most", Value::Object(most.clone())).await;
    assert_eq!(ids(&fixture.records, &filter(Value::Object(most))).await, ["most"]);
}

#[tokio::test]
async fn a_filter_may_also_match_metadata_without_its_key() {
    let fixture = fixture().await;
    for (thread_id, metadata) in [
        ("same", json!({"k": "v"})),
        ("other", json!({"k": "w", "l": 1})),
        ("null", json!({"k": null})),
        ("absent", json!({"l": 1})),
        ("nested", json!({"x": {"k": "w"}})),
    ] {
        create(&fixture.records, thread_id, metadata).await;
    }
    let wanted = |metadata: Value, key: &str| {
        let metadata = MetadataFilter::parse(&object(metadata)).unwrap().or_without(key);
        ThreadQuery { metadata, ..query() }
    };
    let records = &fixture.records;
    assert_eq!(ids(records, &wanted(json!({"k": "v"}), "k")).await, ["same", "nested", "absent"]);
    assert_eq!(ids(records, &wanted(json!({"k": "v", "l": 1}), "k")).await, ["absent"]);
    assert_eq!(ids(records, &wanted(json!({"k": "v"}), "l")).await, ["same"]);
    assert_eq!(records.threads().count(&wanted(json!({"k": "v"}), "k")).await.unwrap(), 3);
}

#[test]
fn bad_filter_entries_are_all_reported() {
    let bad = json!({
        "ok": 1, "": 1, "a.b": 1, "a b": 1, "é": 1, "a\"": 1,
        "list": [1], "object": {}, "unsigned": u64::MAX,
    });
    let rejection = MetadataFilter::parse(&object(bad)).unwrap_err();
    let mut rejected = rejection.rejected.clone();
    rejected.sort();
    let key = |key: &str| (key.to_owned(), FilterProblem::Key);
    let value = |key: &str| (key.to_owned(), FilterProblem::Value);
    assert_eq!(
        rejected,
        [
            key(""),
            key("a b"),
            key("a\""),
            key("a.b"),
            value("list"),
            value("object"),
            value("unsigned"),
            key("é")
        ]
    );
    assert_eq!(rejection.accepted, 1);

    let one = MetadataFilter::parse(&object(json!({"a.b": 1}))).unwrap_err();
    assert_eq!(one.accepted, 0);
    assert_eq!(
        one.to_string(),
        "Invalid metadata filter entries: 'a.b': a key has only letters, digits, '_' and '-'"
    );
    let many: JsonObject = (0..=FILTER_MAX_KEYS).map(|i| (format!("k{i:03}"), json!(i))).collect();
    let many = MetadataFilter::parse(&many).unwrap_err();
    assert_eq!(many.rejected, [(format!("k{FILTER_MAX_KEYS}"), FilterProblem::TooMany)]);
}

fn scalar() -> impl Strategy<Value = Value> {
    let number = |float: f64| Number::from_f64(float).map_or(Value::Null, Value::Number);
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-3i64..3).prop_map(Value::from),
        any::<f64>().prop_map(number),
        (-3i32..3).prop_map(move |n| number(f64::from(n) / 2.0)),
        any::<String>().prop_map(Value::from),
        "[0-9.\"\\\\]{0,3}".prop_map(Value::from),
    ]
}

/// The meaning of the filter, computed without the database.
#[allow(clippy::float_cmp, reason = "equality is what a filter asks for")]
fn matches(filter: &Value, stored: &Value) -> bool {
    match (filter, stored) {
        (Value::Number(filter), Value::Number(stored)) if filter.is_f64() => {
            let (filter, whole) = (filter.as_f64().unwrap(), stored.as_i64().map(i128::from));
            match whole {
                // Compared as integers, because large adjacent integers are equal as floats.
                #[allow(clippy::cast_possible_truncation, reason = "the float is whole and in range")]
                Some(whole) => filter.fract() == 0.0 && filter.abs() < 1e19 && filter as i128 == whole,
                None => stored.as_f64() == Some(filter),
            }
        }
        (Value::Number(filter), Value::Number(stored)) => filter.as_i64() == stored.as_i64(),
        _ => filter == stored,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every stored value is found by the filters equal to it, and by no other.
    #[test]
    fn filter_finds_exactly_the_equal_values(values in prop::collection::vec(scalar(), 1..12)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let records = lone(RecordsOptions::default()).await;
            for (i, value) in values.iter().enumerate() {
                create(&records, &format!("{i:02}"), json!({ "k": value })).await;
            }
            for wanted in &values {
                let mut found = ids(&records, &filter(json!({ "k": wanted }))).await;
                found.sort();
                let expected: Vec<String> = (0..).zip(&values)
                    .filter(|(_, stored)| matches(wanted, stored))
                    .map(|(i, _): (usize, _)| format!("{i:02}"))
                    .collect();
                prop_assert_eq!(found, expected, "{}", wanted);
            }
            Ok(())
        })?;
    }
}
