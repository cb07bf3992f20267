//! Calls of redb, which panics where a damaged page makes no sense to it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use threadkeep::{Error, Result};

/// What a panic said.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    // What redb leaves half done it notices itself: its locks are poisoned, and it repairs the file at the next opening.
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| said(&*panic))
}

/// A call that changes nothing for good; its panic is [`Error::Corrupt`].
pub(crate) fn guarded<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    caught(call).unwrap_or_else(|panic| {
        let reason = format!("{panic}; restore a copy of it, or export the threads that can still be read");
        Err(Error::corrupt("the redb file", reason))
    })
}

fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("redb cannot read it").to_owned()
}
