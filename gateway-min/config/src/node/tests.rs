use proptest::prelude::*;
use serde_json::json;

use super::*;

/// Reads a tree with `read` and returns the result, or the problems as text.
fn read<T>(tree: &Value, read: impl FnOnce(&Node<'_>) -> T) -> Result<T, String> {
    let report = Report::default();
    let value = read(&Node::root(tree.as_object().unwrap(), &report));
    report.finish(None).map(|_| value).map_err(|error| error.to_string())
}

/// The problem reported when reading `{"key": value}`.
fn refused<T: std::fmt::Debug>(value: &Value, getter: impl FnOnce(&Node<'_>) -> T) -> String {
    let error = read(&json!({"key": value}), getter).unwrap_err();
    error.strip_prefix("invalid configuration:\n  ").unwrap().to_owned()
}

#[test]
fn missing_and_null_keys_take_their_defaults() {
    for tree in [json!({}), json!({"key": null})] {
        assert_eq!(read(&tree, |n| n.int("key", 7_u32, 1..)), Ok(7));
        assert_eq!(read(&tree, |n| n.opt_int::<u64>("key", 1..)), Ok(None));
        assert_eq!(read(&tree, |n| n.clamped_int("key", 3, 1, 5)), Ok(3));
        assert_eq!(read(&tree, |n| n.float("key", 0.5, 0.0..=1.0)), Ok(0.5));
        assert_eq!(read(&tree, |n| n.bool("key", true)), Ok(true));
        assert_eq!(read(&tree, |n| n.text("key")), Ok(None));
        assert_eq!(read(&tree, |n| n.secret("key")), Ok(None));
        assert_eq!(read(&tree, |n| n.texts("key")), Ok(None));
        assert_eq!(read(&tree, |n| n.choice("key", &[("a", 1)], 9)), Ok(9));
        assert_eq!(read(&tree, |n| n.items("key").len()), Ok(0));
        assert_eq!(read(&tree, |n| n.named("key").len()), Ok(0));
        assert_eq!(read(&tree, |n| n.variables("key")), Ok(BTreeMap::new()));
        assert_eq!(read(&tree, |n| n.free_form("key")), Ok(FreeForm::default()));
        assert_eq!(read(&tree, |n| n.section("key").int("below", 2_u32, ..)), Ok(2));
    }
}

#[test]
fn integers_are_read_from_numbers_and_texts() {
    for value in [json!(10), json!("10"), json!(" +10 "), json!(10.0), json!(1e1)] {
        assert_eq!(read(&json!({"key": value}), |n| n.int("key", 0_u64, 1..)), Ok(10), "{value}");
    }
    assert_eq!(read(&json!({"key": u64::MAX}), |n| n.int("key", 0_u64, 1..)), Ok(u64::MAX));
    assert_eq!(read(&json!({"key": -3}), |n| n.int("key", 0_i64, ..)), Ok(-3));
}

#[test]
fn integers_outside_the_range_or_of_another_type_are_refused() {
    let int = |n: &Node<'_>| n.int("key", 1_u64, 1..);
    assert_eq!(refused(&json!(0), int), "key: must be an integer >= 1, got 0");
    assert_eq!(refused(&json!(-1), int), "key: must be an integer >= 1, got -1");
    assert_eq!(refused(&json!("0"), int), "key: must be an integer >= 1, got \"0\"");
    assert_eq!(refused(&json!(true), int), "key: must be an integer >= 1, got true");
    assert_eq!(refused(&json!(1.5), int), "key: must be an integer >= 1, got 1.5");
    assert_eq!(refused(&json!([1]), int), "key: must be an integer >= 1, got a list");
    assert_eq!(refused(&json!({"a": 1}), int), "key: must be an integer >= 1, got a mapping");
    assert_eq!(refused(&json!("ten"), int), "key: must be an integer >= 1, got \"ten\"");
    let small = |n: &Node<'_>| n.int("key", 1_u16, 1..=64);
    assert_eq!(refused(&json!(65), small), "key: must be an integer from 1 to 64, got 65");
    assert_eq!(refused(&json!(1_000_000), small), "key: must be an integer from 1 to 64, got 1000000");
    let big = refused(&json!(5_000_000_000_u64), |n| n.int("key", 1_u32, 1..));
    assert_eq!(big, "key: must be a smaller integer >= 1, got 5000000000");
    assert!(refused(&json!(1e300), int).contains(">= 1"));
}

#[test]
fn clamped_integers_move_into_their_range() {
    let clamped = |value: Value| read(&json!({"key": value}), |n| n.clamped_int("key", 3, 1, 5));
    for (given, expected) in [(json!(-9), 1), (json!(0), 1), (json!(4), 4), (json!("4"), 4), (json!(99), 5)] {
        assert_eq!(clamped(given), Ok(expected));
    }
    assert!(clamped(json!("x")).unwrap_err().contains("key: must be an integer, got \"x\""));
}

#[test]
fn numbers_are_read_from_texts_and_checked() {
    let float = |n: &Node<'_>| n.float("key", 0.7, 0.0..=1.0);
    for value in [json!(0.25), json!("0.25")] {
        assert_eq!(read(&json!({"key": value}), float), Ok(0.25));
    }
    assert_eq!(read(&json!({"key": 1}), float), Ok(1.0));
    assert_eq!(refused(&json!(1.01), float), "key: must be a number from 0 to 1, got 1.01");
    assert_eq!(refused(&json!(true), float), "key: must be a number from 0 to 1, got true");
    assert_eq!(refused(&json!("nan"), float), "key: must be a number from 0 to 1, got \"nan\"");
    let positive = |n: &Node<'_>| n.float("key", 1.0, (Bound::Excluded(0.0), Bound::Unbounded));
    assert_eq!(refused(&json!(0), positive), "key: must be a number > 0, got 0");
}

#[test]
fn booleans_are_read_from_the_usual_words() {
    let truth = |value: Value| read(&json!({"key": value}), |n| n.opt_bool("key"));
    for value in [json!(true), json!("true"), json!("True"), json!("yes"), json!("on"), json!("1"), json!(1)]
    {
        assert_eq!(truth(value.clone()), Ok(Some(true)), "{value}");
    }
    for value in [json!(false), json!("FALSE"), json!("no"), json!("off"), json!("0"), json!(0)] {
        assert_eq!(truth(value.clone()), Ok(Some(false)), "{value}");
    }
    for value in [json!(2), json!("maybe"), json!(""), json!(0.0), json!([])] {
        assert!(truth(value.clone()).unwrap_err().contains("key: must be true or false"), "{value}");
    }
}

#[test]
fn texts_are_not_guessed_from_numbers() {
    assert_eq!(read(&json!({"key": "no"}), |n| n.text("key")), Ok(Some("no".to_owned())));
    assert_eq!(read(&json!({"key": ""}), |n| n.nonempty_text("key")), Ok(None));
    let message = refused(&json!(4.1), |n| n.text("key"));
    assert_eq!(message, "key: must be a string (put it in quotes), got 4.1");
    assert_eq!(refused(&json!(null), |n| n.required_text("key")), "key: is required");
    assert_eq!(refused(&json!(" "), |n| n.required_text("key")), "key: must not be blank");
    assert!(refused(&json!(5), |n| n.required_text("key")).contains("must be a string"));
    assert_eq!(read(&json!({"key": ["a", "b"]}), |n| n.texts("key")), Ok(Some(vec!["a".into(), "b".into()])));
    assert_eq!(read(&json!({"key": []}), |n| n.texts("key")), Ok(Some(vec![])));
    assert!(refused(&json!(["a", 1]), |n| n.texts("key")).contains("must be a list of strings"));
}

#[test]
fn choices_are_exact_words() {
    let choice = |n: &Node<'_>| n.choice("key", &[("full", 1), ("delta", 2)], 0);
    assert_eq!(read(&json!({"key": "delta"}), choice), Ok(2));
    assert_eq!(refused(&json!("Delta"), choice), "key: must be one of full, delta, got \"Delta\"");
    assert_eq!(refused(&json!(1), choice), "key: must be one of full, delta, got 1");
}

#[test]
fn structures_are_walked_and_problems_name_the_path() {
    let tree =
        json!({"models": [{"n": 1}, {"n": 0}, 5], "agents": {"a": {"n": 0}, "b": null, "c": 3}, "x": 1});
    let error = read(&tree, |root| {
        let models: Vec<u32> = root.items("models").iter().map(|n| n.int("n", 9, 1..)).collect();
        assert_eq!(models, [1, 9, 9]);
        let agents = root.named("agents");
        let agents: Vec<_> = agents.iter().map(|(name, n)| (*name, n.int("n", 9_u32, 1..))).collect();
        assert_eq!(agents, [("a", 9), ("b", 9), ("c", 9)]);
        root.section("x");
        root.items("x");
    });
    assert_eq!(
        error.unwrap_err(),
        "invalid configuration:\
         \n  models[2]: must be a mapping, got 5\
         \n  models[1].n: must be an integer >= 1, got 0\
         \n  agents.c: must be a mapping, got 3\
         \n  agents.a.n: must be an integer >= 1, got 0\
         \n  x: must be a mapping, got 1\
         \n  x: must be a list, got 1"
    );
}

#[test]
fn variables_are_written_out_and_never_shown() {
    let tree = json!({"key": {"A": "x", "B": 12, "C": true, "D": null}});
    let variables = read(&tree, |n| n.variables("key")).unwrap();
    let plain: Vec<(&str, &str)> = variables.iter().map(|(k, v)| (k.as_str(), v.expose())).collect();
    assert_eq!(plain, [("A", "x"), ("B", "12"), ("C", "true"), ("D", "")]);
    assert!(!format!("{variables:?}").contains("12"));
    assert_eq!(refused(&json!({"A": ["x"]}), |n| n.variables("key")), "key.A: must be a string");
}

#[test]
fn the_rest_is_what_is_not_known() {
    let tree = json!({"a": 1, "b": {"c": 2}});
    let rest = read(&tree, |n| n.rest(&["a"])).unwrap();
    assert_eq!(Value::Object(rest.as_map().clone()), json!({"b": {"c": 2}}));
}

#[test]
fn secrets_and_values_from_the_environment_are_not_shown() {
    assert_eq!(read(&json!({"key": "s"}), |n| n.secret("key")), Ok(Some(Secret::new("s"))));
    assert_eq!(read(&json!({"key": ""}), |n| n.secret("key")), Ok(None));
    assert_eq!(refused(&json!(1234), |n| n.secret("key")), "key: must be a string (put it in quotes)");

    let tree = json!({"api_key": 1234, "size": "hidden"});
    let report = Report::new([("size".to_owned(), "SIZE".to_owned())].into());
    let root = Node::root(tree.as_object().unwrap(), &report);
    root.text("api_key");
    root.int("size", 1_u32, 1..);
    let error = report.finish(None).unwrap_err();
    assert_eq!(
        error.to_string(),
        "invalid configuration:\
         \n  api_key: must be a string (put it in quotes), got ***\
         \n  size: must be an integer >= 1, got the value of $SIZE"
    );
    assert!(!format!("{error:?}").contains("1234"));
}

#[test]
fn long_values_are_cut() {
    let message = refused(&json!("x".repeat(500)), |n| n.bool("key", true));
    assert!(message.ends_with("xxx..."), "{message}");
    assert!(message.len() < 150, "{message}");
}

#[test]
fn warnings_are_kept_in_order() {
    let report = Report::default();
    report.warn("one".into());
    Node::root(&Map::new(), &report).warn("two".into());
    assert_eq!(report.finish(None).unwrap(), ["one", "two"]);
}

proptest! {
    /// A number means the same whether it is a number or a string.
    #[test]
    fn a_text_is_the_number_it_spells(number in any::<i64>(), low in any::<i64>()) {
        let get = |value: Value| read(&json!({"key": value}), |n| n.opt_int::<i64>("key", low..)).ok();
        prop_assert_eq!(get(json!(number)), get(json!(number.to_string())));
        prop_assert_eq!(get(json!(number)).is_some(), number >= low);
    }

    #[test]
    fn a_float_text_is_the_float_it_spells(number in -1e9..1e9_f64) {
        let get = |value: Value| read(&json!({"key": value}), |n| n.opt_float("key", ..)).unwrap();
        prop_assert_eq!(get(json!(number)), Some(number));
        prop_assert_eq!(get(json!(number.to_string())), Some(number));
    }
}
