// Closures, because the methods are not general over the lifetime of the field.
#![allow(clippy::redundant_closure_for_method_calls)]

use serde::Serialize;
use serde_json::json;

use super::*;

type Reader<T> = fn(Field<'_>) -> Option<T>;

/// Reads the field `x` of `body`; returns the value and the problems.
fn read<T>(body: Value, read: Reader<T>) -> (Option<T>, Value) {
    read_in("body", body, read)
}

/// The same of another part of a request.
fn read_in<T>(part: &str, body: Value, read: Reader<T>) -> (Option<T>, Value) {
    let Value::Object(values) = body else { panic!("not an object: {body}") };
    let mut problems = Problems::default();
    let value = read(Fields::new(values, vec![part.into()], &mut problems).field("x"));
    (value, json!(problems))
}

/// Checks what strings of a query read as; in a body they are refused with this type.
fn spelt<T: Serialize>(reader: Reader<T>, cases: &[(&str, Value)], kind: &str) {
    for (input, expected) in cases {
        let (value, problems) = read_in("query", json!({"x": input}), reader);
        assert_eq!((json!(value), problems), (expected.clone(), json!([])), "{input}");
        let (value, problems) = read(json!({"x": input}), reader);
        assert_eq!((json!(value), &problems[0]["type"]), (Value::Null, &json!(kind)), "{input}");
    }
}

/// Checks that a query with one of these strings is refused with this type and text.
fn misspelt<T: Serialize>(reader: Reader<T>, kind: &str, msg: &str, inputs: &[&str]) {
    for input in inputs {
        let (value, problems) = read_in("query", json!({"x": input}), reader);
        let item = json!({"type": kind, "loc": ["query", "x"], "msg": msg, "input": input});
        assert_eq!((json!(value), problems), (Value::Null, json!([item])), "{input}");
    }
}

/// Checks the value that `x` reads as.
fn accepts<T: Serialize>(reader: Reader<T>, cases: &[(Value, Value)]) {
    for (input, expected) in cases {
        let (value, problems) = read(json!({"x": input}), reader);
        assert_eq!((json!(value), problems), (expected.clone(), json!([])), "{input}");
    }
}

/// Checks that each of these is refused with this type, text and context.
fn refuses<T: Serialize>(reader: Reader<T>, kind: &str, msg: &str, ctx: &Value, inputs: &[Value]) {
    for input in inputs {
        let (value, problems) = read(json!({"x": input}), reader);
        let mut item = json!({"type": kind, "loc": ["body", "x"], "msg": msg, "input": input});
        if !ctx.is_null() {
            item["ctx"] = ctx.clone();
        }
        assert_eq!((json!(value), problems), (Value::Null, json!([item])), "{input}");
    }
}

fn same(values: &[Value]) -> Vec<(Value, Value)> {
    values.iter().map(|value| (value.clone(), value.clone())).collect()
}

const NULL: Value = Value::Null;

#[test]
fn texts_are_read_or_refused() {
    const TEXT: &str = "Input should be a valid string";
    accepts(|f| f.text(), &same(&[json!("a"), json!("")]));
    refuses(|f| f.text(), "string_type", TEXT, &NULL, &[json!(1), NULL, json!(["a"]), json!(true)]);

    let sized: Reader<String> = |f| f.text_sized(&(1..=3));
    accepts(sized, &same(&[json!("a"), json!("\u{e4}\u{e4}\u{e4}")]));
    let msg = "String should have at least 1 character";
    refuses(sized, "string_too_short", msg, &json!({"min_length": 1}), &[json!("")]);
    let msg = "String should have at most 3 characters";
    refuses(sized, "string_too_long", msg, &json!({"max_length": 3}), &[json!("abcd")]);
    refuses(sized, "string_type", TEXT, &NULL, &[json!(7)]);

    let id: Reader<String> = |f| f.text_matching(&Pattern::THREAD_ID);
    accepts(id, &same(&[json!("aZ_-09"), json!("a".repeat(64))]));
    let ctx = json!({"pattern": "^[A-Za-z0-9_-]{1,64}$"});
    let bad = ["", &"a".repeat(65), "a/b", "a.b", "a\n", "\u{e4}"].map(|text| json!(text));
    let msg = "String should match pattern '^[A-Za-z0-9_-]{1,64}$'";
    refuses(id, "string_pattern_mismatch", msg, &ctx, &bad);
    refuses(id, "string_type", TEXT, &NULL, &[json!(7)]);
}

#[test]
fn one_of_names_what_is_allowed() {
    accepts(|f| f.one_of(&["a", "b", "c"]), &same(&[json!("a"), json!("c")]));
    let refused = |reader: Reader<&'static str>, expected: &str| {
        let msg = format!("Input should be {expected}");
        let ctx = json!({"expected": expected});
        refuses(reader, "literal_error", &msg, &ctx, &[json!("A"), json!(1), NULL]);
    };
    refused(|f| f.one_of(&["a"]), "'a'");
    refused(|f| f.one_of(&["a", "b"]), "'a' or 'b'");
    refused(|f| f.one_of(&["a", "b", "c"]), "'a', 'b' or 'c'");
}

#[test]
fn integers_are_read_or_refused() {
    let reader: Reader<i64> = |f| f.integer(&(1..=100));
    accepts(reader, &same(&[json!(1), json!(100)]));
    accepts(reader, &[(json!(5.0), json!(5))]);
    spelt(reader, &[("7", json!(7)), (" 7 ", json!(7))], "int_type");
    let small = [json!(0), json!(-5), json!(-1e300)];
    let msg = "Input should be greater than or equal to 1";
    refuses(reader, "greater_than_equal", msg, &json!({"ge": 1}), &small);
    let great = [json!(101), json!(u64::MAX), json!(1e300)];
    refuses(
        reader,
        "less_than_equal",
        "Input should be less than or equal to 100",
        &json!({"le": 100}),
        &great,
    );
    let unbounded: Reader<i64> = |f| f.integer(&(i64::MIN..=i64::MAX));
    let msg = "Input should be less than or equal to 9223372036854775807";
    let beyond = [json!(u64::MAX), json!(9_223_372_036_854_775_808_u64), json!(1e300)];
    refuses(unbounded, "less_than_equal", msg, &json!({"le": i64::MAX}), &beyond);
    let msg = "Input should be a valid integer";
    refuses(reader, "int_type", msg, &NULL, &[json!(true), NULL, json!([1])]);
    let fraction = format!("{msg}, got a number with a fractional part");
    refuses(reader, "int_from_float", &fraction, &NULL, &[json!(1.5)]);
    let text = format!("{msg}, unable to parse string as an integer");
    misspelt(reader, "int_parsing", &text, &["x", "", "1.0"]);
}

#[test]
fn an_integer_above_a_range_that_clamps_counts_as_its_end() {
    let reader: Reader<i64> = |f| f.clamped(&(1..=100));
    accepts(reader, &same(&[json!(1), json!(100)]));
    let above = [json!(101), json!(i64::MAX), json!(u64::MAX), json!(1e300)];
    accepts(reader, &above.map(|number| (number, json!(100))));
    spelt(reader, &[("7", json!(7)), ("9223372036854775808", json!(100))], "int_type");
    let msg = "Input should be greater than or equal to 1";
    refuses(reader, "greater_than_equal", msg, &json!({"ge": 1}), &[json!(0), json!(-1e300)]);
    refuses(reader, "int_type", "Input should be a valid integer", &NULL, &[json!(true), NULL]);
}

#[test]
fn booleans_are_read_or_refused() {
    accepts(|f| f.flag(), &same(&[json!(true), json!(false)]));
    let yes = ["1", "True", "on", "t", "y", "yes"].map(|word| (word, json!(true)));
    let no = ["0", "FALSE", "off", "f", "n", "no"].map(|word| (word, json!(false)));
    spelt(|f| f.flag(), &[yes, no].concat(), "bool_type");
    let msg = "Input should be a valid boolean";
    refuses(|f| f.flag(), "bool_type", msg, &NULL, &[NULL, json!([]), json!(1), json!(0), json!(0.5)]);
    misspelt(|f| f.flag(), "bool_parsing", &format!("{msg}, unable to interpret input"), &["2", "maybe", ""]);
}

#[test]
fn containers_are_read_or_refused() {
    accepts(|f| f.object(), &same(&[json!({}), json!({"a": 1})]));
    let msg = "Input should be a valid dictionary";
    refuses(|f| f.object(), "dict_type", msg, &NULL, &[json!([]), json!("{}"), NULL]);
    accepts(|f| f.texts(), &same(&[json!([]), json!(["a", "b"])]));
    let msg = "Input should be a valid list";
    refuses(|f| f.texts(), "list_type", msg, &NULL, &[json!({}), json!("a"), NULL]);
    refuses(|f| f.at_most(2).texts(), "list_type", msg, &NULL, &[json!({}), json!("abc"), NULL]);
    accepts(|f| f.at_most(2).texts(), &same(&[json!([]), json!(["a", "b"])]));
    let (value, problems) = read(json!({"x": ["a", "b", 3]}), |f| f.at_most(2).texts());
    let too_long = json!([{
        "type": "too_long", "loc": ["body", "x"], "msg": "List should have at most 2 items, not 3", "input": null,
        "ctx": {"max_length": 2, "actual_length": 3},
    }]);
    assert_eq!((value, problems), (None, too_long));
    let (_, problems) = read(json!({"x": ["a", 1, null]}), |f| f.texts());
    let item = |place: usize, input: Value| {
        let msg = "Input should be a valid string";
        json!({"type": "string_type", "loc": ["body", "x", place], "msg": msg, "input": input})
    };
    assert_eq!(problems, json!([item(1, json!(1)), item(2, NULL)]));
}

#[test]
fn a_choice_that_is_there_twice_counts_once() {
    let chosen: Reader<Vec<&'static str>> = |f| f.each_of(&["a", "b", "c"]);
    accepts(chosen, &[(json!(["b", "a", "b", "a", "b"]), json!(["b", "a"])), (json!([]), json!([]))]);
    let (value, problems) = read(json!({"x": ["a", "d", "d"]}), chosen);
    let refused: Vec<_> = problems.as_array().unwrap().iter().map(|problem| problem["loc"].clone()).collect();
    assert_eq!((value, refused), (Some(vec!["a"]), vec![json!(["body", "x", 1]), json!(["body", "x", 2])]));
}

#[test]
fn an_absent_field_is_none_unless_it_is_required() {
    assert_eq!(read(json!({}), |f| f.text()), (None, json!([])));
    assert_eq!(read(json!({"x": null}), |field| field.nullable().text()), (None, json!([])));
    assert_eq!(read(json!({"x": null}), |f| f.any()), (Some(Value::Null), json!([])));
    let missing = json!([{"type": "missing", "loc": ["body", "x"], "msg": "Field required", "input": null}]);
    assert_eq!(read(json!({}), |field| field.required().text()), (None, missing));
    assert_eq!(read(json!({"x": "a"}), |field| field.required().text()), (Some("a".into()), json!([])));
}

#[test]
fn nested_fields_have_their_full_place_and_all_problems_are_reported() {
    let Value::Object(values) = json!({"inner": {"n": 0, "other": 1}, "more": [], "text": 3}) else {
        panic!()
    };
    let mut problems = Problems::default();
    let mut fields = Fields::new(values, vec!["body".into()], &mut problems);
    assert_eq!(fields.field("text").text(), None);
    let mut inner = fields.field("inner").fields().unwrap();
    assert_eq!(inner.field("n").integer(&(1..=9)), None);
    inner.deny_others();
    fields.deny_others();
    let found: Vec<_> =
        json!(problems).as_array().unwrap().iter().map(|p| (p["type"].clone(), p["loc"].clone())).collect();
    assert_eq!(
        found,
        [
            (json!("string_type"), json!(["body", "text"])),
            (json!("greater_than_equal"), json!(["body", "inner", "n"])),
            (json!("extra_forbidden"), json!(["body", "inner", "other"])),
            (json!("extra_forbidden"), json!(["body", "more"])),
        ]
    );
    let mut problems = Problems::default();
    let Value::Object(values) = json!({"inner": []}) else { panic!() };
    assert!(Fields::new(values, vec![], &mut problems).field("inner").fields().is_none());
    assert_eq!(json!(problems)[0]["type"], "dict_type");
}

#[test]
fn an_item_has_its_keys_in_the_order_of_the_reference_and_its_debug_form_keeps_the_input_back() {
    let problems = Problems::one(vec!["body".into(), 3.into()], Flaw::literal(&["a"]), json!("hunter2"));
    assert_eq!(
        serde_json::to_string(&problems).unwrap(),
        r#"[{"type":"literal_error","loc":["body",3],"msg":"Input should be 'a'","input":"hunter2","ctx":{"expected":"'a'"}}]"#
    );
    assert!(!format!("{problems:?}").contains("hunter2"), "{problems:?}");
    assert!(Problems::default().is_empty() && !problems.is_empty());
}

#[test]
fn an_answer_is_not_larger_than_what_provoked_it() {
    let bad = vec![json!(0); 100_000];
    let long = "\u{e9}".repeat(1_000_000);
    let nested = json!({"deep": vec![long.clone(); 3]});
    let mut problems = Problems::default();
    let values = json!({"ids": bad, "text": {"a": [long.clone()]}, long.clone(): 1, "nested": nested});
    let mut fields = Fields::new(values.as_object().unwrap().clone(), vec!["body".into()], &mut problems);
    fields.field("text").text();
    fields.field("nested").integer(&(0..=1));
    fields.refuse(&long, Flaw::extra_forbidden(), json!(long));
    fields.field("ids").texts();
    let answer = serde_json::to_value(&problems).unwrap();
    let items = answer.as_array().unwrap();
    assert_eq!(items.len(), 100);
    assert!(answer.to_string().len() < 30_000, "{} bytes", answer.to_string().len());
    let cut = format!("{}\u{2026}", "\u{e9}".repeat(200));
    assert_eq!(items[2]["input"], json!(cut));
    assert_eq!(items[2]["loc"], json!(["body", cut]));
    assert!(items[0]["input"].as_str().unwrap().starts_with(r#"{"a":[""#), "{}", items[0]["input"]);
    // What is short is repeated as it came.
    let short = json!({"a": [1, 2.5, null, "x"]});
    let one = Problems::one(vec!["body".into()], Flaw::no_object(), short.clone());
    assert_eq!(serde_json::to_value(&one).unwrap()[0]["input"], short);
}
