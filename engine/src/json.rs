//! Parses JSON without changing its numbers, and measures how deeply it is nested.

use serde::de::{DeserializeOwned, Error as _};
use serde_json::Value;

/// The most that an error repeats of a number, in characters.
const SHOWN: usize = 40;

/// Parses JSON as [`serde_json::from_slice`] does, but refuses an integer that no 64-bit number holds. `serde_json` reads
/// such an integer as the nearest float without an error, and afterwards nothing shows that it was another number.
///
/// Whatever comes from outside and is stored should be parsed with this: [`crate::value::ChannelValue::from_json`] and
/// [`crate::metadata::Extra`] keep every number that a [`serde_json::Value`] can hold.
///
/// # Errors
/// Those of `serde_json`; for such an integer, with its line and column.
pub fn from_slice<T: DeserializeOwned>(text: &[u8]) -> serde_json::Result<T> {
    let parsed = serde_json::from_slice(text)?;
    match too_large(text) {
        None => Ok(parsed),
        Some(number) => Err(refused(text, number)),
    }
}

/// As [`from_slice`].
///
/// # Errors
/// As there.
pub fn from_str<T: DeserializeOwned>(text: &str) -> serde_json::Result<T> {
    from_slice(text.as_bytes())
}

/// Whether a value is nested more than `levels` deep. Writers of JSON accept any depth, and readers do not: what must
/// be read back should be refused or stored otherwise if it is deeper than its readers allow.
pub fn is_deeper(value: &Value, levels: usize) -> bool {
    match value {
        Value::Array(items) => levels == 0 || items.iter().any(|item| is_deeper(item, levels - 1)),
        Value::Object(fields) => levels == 0 || fields.values().any(|field| is_deeper(field, levels - 1)),
        _ => false,
    }
}

/// Where the first integer is that neither an `i64` nor a `u64` holds, in valid JSON.
fn too_large(text: &[u8]) -> Option<std::ops::Range<usize>> {
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        match byte {
            b'"' => at = after_string(text, at + 1),
            b'-' | b'0'..=b'9' => {
                let rest = text.get(at..).unwrap_or_default();
                let is_part = |byte: &u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
                let number = rest.split(|byte| !is_part(byte)).next().unwrap_or_default();
                if !is_exact(number) {
                    return Some(at..at + number.len());
                }
                at += number.len();
            }
            _ => at += 1,
        }
    }
    None
}

/// The position after the string whose contents begin at `at`.
fn after_string(text: &[u8], mut at: usize) -> usize {
    loop {
        match text.get(at) {
            Some(b'\\') => at += 2,
            Some(b'"') | None => return at + 1,
            Some(_) => at += 1,
        }
    }
}

/// Whether a number is read as what it says: a float as the nearest one, an integer exactly.
fn is_exact(number: &[u8]) -> bool {
    // Shorter ones always fit.
    if number.len() < 19 || number.iter().any(|byte| matches!(byte, b'.' | b'e' | b'E')) {
        return true;
    }
    std::str::from_utf8(number).is_ok_and(|text| text.parse::<i64>().is_ok() || text.parse::<u64>().is_ok())
}

fn refused(text: &[u8], number: std::ops::Range<usize>) -> serde_json::Error {
    let before = text.get(..number.start).unwrap_or_default();
    let mut lines = before.split(|byte| *byte == b'\n');
    let line = lines.clone().count();
    let column = lines.next_back().map_or(0, <[u8]>::len) + 1;
    let number = String::from_utf8_lossy(text.get(number).unwrap_or_default());
    let shown: String = number.chars().take(SHOWN).collect();
    let cut = if shown.len() < number.len() { "..." } else { "" };
    // serde_json takes line and column from the end of the text.
    serde_json::Error::custom(format!(
        "integer {shown}{cut} is out of range: it must be from {} to {}; send it as a string at line {line} column {column}",
        i64::MIN,
        u64::MAX
    ))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value as Json, json};

    use super::*;

    #[test]
    fn an_integer_beyond_64_bits_is_refused_with_its_place() {
        for (text, line, column, number) in [
            ("18446744073709551616", 1, 1, "18446744073709551616"),
            ("[1, -9223372036854775809]", 1, 5, "-9223372036854775809"),
            (
                "{\n \"a\": {\"b\": [true, 123456789012345678901234567890]}}",
                2,
                20,
                "123456789012345678901234567890",
            ),
            ("{\"12345678901234567890123\\\"\": 99999999999999999999}", 1, 31, "99999999999999999999"),
        ] {
            let error = from_str::<Json>(text).unwrap_err();
            assert_eq!((error.line(), error.column()), (line, column), "{text}: {error}");
            assert!(error.to_string().contains(&format!("integer {number} is out of range")), "{error}");
        }
        let error = from_str::<Json>(&"9".repeat(5000)).unwrap_err().to_string();
        assert!(error.len() < 250, "{error}");
    }

    #[test]
    fn everything_else_is_parsed_as_by_serde_json() {
        for text in [
            "18446744073709551615",
            "-9223372036854775808",
            "0.12345678901234567890123",
            "1e300",
            "123456789012345678901234567890.0",
            "12345678901234567890E2",
            "\"123456789012345678901234567890\"",
            "{\"123456789012345678901234567890\": \"a\\\\\", \"b\": \"\\\"99999999999999999999\"}",
            "[]",
        ] {
            assert_eq!(
                from_str::<Json>(text).unwrap(),
                serde_json::from_str::<Json>(text).unwrap(),
                "{text}"
            );
        }
        assert!(from_str::<Json>("[1,").is_err());
    }

    #[test]
    fn lists_and_objects_are_levels_and_what_they_hold_is_none() {
        for (value, levels) in [
            (json!("text"), 0),
            (json!([]), 1),
            (json!({"a": 1, "b": [2]}), 2),
            (json!([{"a": 1}, [{"b": []}]]), 4),
        ] {
            assert!(!is_deeper(&value, levels), "{value}");
            assert!(levels == 0 || is_deeper(&value, levels - 1), "{value}");
        }
    }

    proptest! {
        #[test]
        fn it_refuses_exactly_the_integers_that_would_change(
            digits in "-?[1-9][0-9]{0,25}", key in "[\"\\\\0-9,:]{0,8}", spaces in "[ \n]{0,3}"
        ) {
            let text = format!("{}{{{}:{spaces}[\"x\",{digits}]}}", spaces, json!(key));
            let plain: Json = serde_json::from_str(&text).unwrap();
            let shown = plain[&key][1].to_string();
            let kept = shown == digits;
            prop_assert_eq!(from_str::<Json>(&text).is_ok(), kept, "{}", text);
            if kept {
                prop_assert_eq!(from_str::<Json>(&text).unwrap(), plain);
            }
        }
    }
}
