//! The names of channels, listed once for the checkpoints that have the same ones.

use threadkeep::id::ChannelName;

use crate::codec::{Decoder, Malformed, put_bytes, put_len};
use crate::row::{first_byte, take_plain_start};

/// The bytes of the element that lists the names of channels.
pub fn encode_names<'a>(names: impl ExactSizeIterator<Item = &'a ChannelName>) -> Vec<u8> {
    let mut out = vec![first_byte(0)];
    put_len(&mut out, names.len());
    for name in names {
        put_bytes(&mut out, name.as_str().as_bytes());
    }
    out
}

/// Reads what [`encode_names`] wrote.
pub fn decode_names(bytes: &[u8]) -> Result<Vec<ChannelName>, Malformed> {
    let mut decoder = Decoder::new(bytes);
    take_plain_start(&mut decoder)?;
    let names =
        (0..decoder.count()?).map(|_| decoder.text().map(ChannelName::from)).collect::<Result<_, _>>()?;
    decoder.finish()?;
    Ok(names)
}
