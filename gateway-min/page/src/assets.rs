//! The files of the page, which browsers keep: an address has a digest of its content.

/// The style sheet.
pub const STYLE: &str = include_str!("style.css");
/// The script.
pub const SCRIPT: &str = include_str!("script.js");
/// Where the style sheet is served.
pub const STYLE_PATH: &str = "/page/style.css";
/// Where the script is served.
pub const SCRIPT_PATH: &str = "/page/script.js";

/// The FNV-1a digest of a text: it need not resist an attacker, only change when the file changes.
const fn digest(text: &str) -> u64 {
    let (bytes, mut digest, mut at) = (text.as_bytes(), 0xcbf2_9ce4_8422_2325_u64, 0);
    while at < bytes.len() {
        digest = (digest ^ bytes[at] as u64).wrapping_mul(0x0100_0000_01b3);
        at += 1;
    }
    digest
}

/// The address of the style sheet, as pages name it.
pub(crate) fn style() -> String {
    const DIGEST: u64 = digest(STYLE);
    format!("{STYLE_PATH}?v={DIGEST:016x}")
}

/// The address of the script, as pages name it.
pub(crate) fn script() -> String {
    const DIGEST: u64 = digest(SCRIPT);
    format!("{SCRIPT_PATH}?v={DIGEST:016x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_are_small_and_load_nothing() {
        assert!(STYLE.len() + SCRIPT.len() < 150 * 1024, "even before compression");
        for (name, file) in [("style", STYLE), ("script", SCRIPT)] {
            for part in ["http://", "https://", "@import", "eval(", "innerHTML", "document.write"] {
                assert!(!file.contains(part), "{name}: {part}");
            }
        }
        assert_ne!(style(), script());
        assert_eq!(digest(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(digest("a"), 0xaf63_dc4c_8601_ec8c);
    }
}
