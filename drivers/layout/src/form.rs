//! Stored values: inline if small, otherwise by the numbers of their elements.

use bytes::Bytes;

use crate::codec::{Decoder, Malformed, put_bytes, put_len, put_uint};
use crate::manifest::{Manifest, NUMBER_LIMIT, Run, put_runs, take_runs};

/// How a value is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Form {
    /// The bytes themselves.
    Plain(Bytes),
    /// An element that holds the whole value.
    Shared(u32),
    /// A list, with the bytes of its elements.
    Tiny(Vec<Bytes>),
    /// A list of stored elements.
    List(Manifest),
}

/// The bits that encode a value's form in the byte before it. The byte's other bits belong to the caller.
pub const FORM: u8 = 7 << 3;

const PLAIN: u8 = 0;
const SHARED: u8 = 1 << 3;
const TINY: u8 = 2 << 3;
const RUN: u8 = 3 << 3;
const RUNS: u8 = 4 << 3;

/// The form as bits within [`FORM`]; [`put_form`] writes the rest.
pub fn form_bits(form: &Form) -> u8 {
    match form {
        Form::Plain(_) => PLAIN,
        Form::Shared(_) => SHARED,
        Form::Tiny(_) => TINY,
        Form::List(manifest) if single_run(manifest).is_some() => RUN,
        Form::List(_) => RUNS,
    }
}

fn single_run(manifest: &Manifest) -> Option<Run> {
    match (&manifest.chunks[..], &manifest.tail[..]) {
        ([], [run]) => Some(*run),
        _ => None,
    }
}

/// Appends a form.
pub fn put_form(out: &mut Vec<u8>, form: &Form) {
    match form {
        Form::Plain(bytes) => put_bytes(out, bytes),
        Form::Shared(number) => put_uint(out, *number),
        Form::Tiny(elements) => {
            put_len(out, elements.len());
            for element in elements {
                put_bytes(out, element);
            }
        }
        Form::List(manifest) => {
            if let Some(run) = single_run(manifest) {
                put_uint(out, run.start);
                put_uint(out, run.len);
            } else {
                put_runs(out, &manifest.chunks);
                put_runs(out, &manifest.tail);
            }
        }
    }
}

/// Reads what [`put_form`] wrote after a byte with these bits.
///
/// # Errors
/// [`Malformed`]
pub fn take_form(decoder: &mut Decoder<'_>, bits: u8) -> Result<Form, Malformed> {
    Ok(match bits & FORM {
        PLAIN => Form::Plain(Bytes::copy_from_slice(decoder.bytes()?)),
        SHARED => Form::Shared(take_number(decoder)?),
        TINY => {
            let count = decoder.count()?;
            let elements = (0..count).map(|_| decoder.bytes().map(Bytes::copy_from_slice));
            Form::Tiny(elements.collect::<Result<_, _>>()?)
        }
        RUN => {
            let run = Run { start: decoder.u32()?, len: decoder.u32()? }.checked()?;
            Form::List(Manifest { chunks: Vec::new(), tail: vec![run] })
        }
        RUNS => Form::List(Manifest { chunks: take_runs(decoder)?, tail: take_runs(decoder)? }),
        _ => return Err(Malformed("unknown form of a value")),
    })
}

/// Reads the number of an element.
///
/// # Errors
/// [`Malformed`] if it is out of range.
pub fn take_number(decoder: &mut Decoder<'_>) -> Result<u32, Malformed> {
    let number = decoder.u32()?;
    if number < NUMBER_LIMIT {
        Ok(number)
    } else {
        Err(Malformed("the number of an element is out of range"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn runs() -> impl Strategy<Value = Vec<Run>> {
        let run = (0..NUMBER_LIMIT - 5000, 1..5000_u32).prop_map(|(start, len)| Run { start, len });
        prop::collection::vec(run, 0..5)
    }

    fn form() -> impl Strategy<Value = Form> {
        let some_bytes = || prop::collection::vec(any::<u8>(), 0..40).prop_map(Bytes::from);
        prop_oneof![
            some_bytes().prop_map(Form::Plain),
            (0..NUMBER_LIMIT).prop_map(Form::Shared),
            prop::collection::vec(some_bytes(), 0..4).prop_map(Form::Tiny),
            (runs(), runs()).prop_map(|(chunks, tail)| Form::List(Manifest { chunks, tail })),
        ]
    }

    proptest! {
        #[test]
        fn a_form_survives_and_a_cut_one_is_refused(form in form()) {
            let mut out = Vec::new();
            put_form(&mut out, &form);
            let read = |bytes: &[u8]| {
                let mut decoder = Decoder::new(bytes);
                let form = take_form(&mut decoder, form_bits(&form))?;
                decoder.finish().map(|()| form)
            };
            for len in 0..out.len() {
                prop_assert!(read(&out[..len]).is_err());
            }
            prop_assert_eq!(read(&out), Ok(form.clone()));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..60), bits in any::<u8>()) {
            let _ = take_form(&mut Decoder::new(&bytes), bits);
        }
    }

    #[test]
    fn numbers_end_below_the_limit() {
        let mut out = Vec::new();
        put_uint(&mut out, NUMBER_LIMIT);
        assert!(take_number(&mut Decoder::new(&out)).is_err());
        out.clear();
        put_uint(&mut out, NUMBER_LIMIT - 1);
        put_uint(&mut out, 2_u32);
        assert!(take_form(&mut Decoder::new(&out), RUN).is_err());
    }
}
