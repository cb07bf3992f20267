//! The cases, by what they are about.

mod commit;
mod concurrency;
mod defects;
mod delete;
mod durability;
mod get;
mod history;
mod list;
mod lists;
mod put_writes;
mod rewrite;
mod values;

use crate::case::Case;
use crate::model;

/// Every case of the suite.
pub fn cases() -> Vec<Case> {
    [
        get::CASES,
        list::CASES,
        put_writes::CASES,
        commit::CASES,
        history::CASES,
        delete::CASES,
        rewrite::CASES,
        values::CASES,
        lists::CASES,
        defects::CASES,
        model::CASES,
        concurrency::CASES,
        durability::CASES,
    ]
    .concat()
}
