//! The cases, by topic.

mod atomic;
mod commit;
mod concurrency;
mod copy;
mod create;
mod defects;
mod defects_live;
mod delete;
mod deletion;
mod durability;
mod get;
mod history;
pub(crate) mod killed;
mod list;
mod lists;
mod moment;
mod put_writes;
mod races;
mod revisions;
mod rewrite;
mod stored;
mod summary;
mod threads;
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
        summary::CASES,
        threads::CASES,
        revisions::CASES,
        rewrite::CASES,
        create::CASES,
        copy::CASES,
        deletion::CASES,
        values::CASES,
        lists::CASES,
        defects::CASES,
        defects_live::CASES,
        model::CASES,
        concurrency::CASES,
        races::CASES,
        moment::CASES,
        atomic::CASES,
        durability::CASES,
        stored::CASES,
        killed::CASES,
    ]
    .concat()
}
