//! A number that is parsed, stored and read comes back equal.

use proptest::prelude::*;
use serde_json::Value as Json;
use threadkeep::value::ChannelValue;

/// The text of a number, and of what is read after it was stored.
fn stored(text: &str) -> String {
    let parsed: Json = serde_json::from_str(text).unwrap();
    let value = ChannelValue::from_json(&parsed).unwrap();
    let read = ChannelValue::from_encoded(value.to_encoded()).unwrap().to_json().unwrap();
    assert_eq!(read, parsed, "{text}");
    if let Some(float) = parsed.as_f64().filter(|_| parsed.is_f64()) {
        assert_eq!(read.as_f64().unwrap().to_bits(), float.to_bits(), "{text}");
    }
    read.to_string()
}

#[test]
fn numbers_at_the_edges_come_back_as_they_were() {
    for text in [
        "0",
        "-0.0",
        "-9223372036854775808",
        "18446744073709551615",
        "0.1",
        "0.30000000000000004",
        "31.245270191439438",
        "5e-324",
        "2.225073858507201e-308",
        "1.7976931348623157e+308",
        "9007199254740993",
    ] {
        assert_eq!(stored(text), text);
    }
    assert!(serde_json::from_str::<Json>("1e400").is_err(), "refused, not infinite");
}

proptest! {
    #[test]
    fn a_float_keeps_every_bit(bits: u64) {
        let float = f64::from_bits(bits);
        prop_assume!(float.is_finite());
        let text = serde_json::to_string(&float).unwrap();
        prop_assert_eq!(serde_json::from_str::<f64>(&stored(&text)).unwrap().to_bits(), bits);
    }

    #[test]
    fn an_integer_keeps_every_digit(signed: i64, unsigned: u64) {
        prop_assert_eq!(stored(&signed.to_string()), signed.to_string());
        prop_assert_eq!(stored(&unsigned.to_string()), unsigned.to_string());
    }
}
