use rusqlite::StatementStatus;

use super::*;

#[test]
fn a_statement_with_a_bound_limit_is_prepared_once() {
    const SQL: &str = "SELECT key FROM checkpoint WHERE key >= ?1 ORDER BY key LIMIT ?2";
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("db");
    let writer = Db::writer(&path, &Options::default()).unwrap();
    let reader = Db::reader(&path, &Options::default()).unwrap();
    for db in [writer, reader] {
        for limit in 1..4 {
            db.each(SQL, (0, limit), |_| Ok(())).unwrap();
        }
        let statement = db.conn.prepare_cached(SQL).unwrap();
        assert_eq!(statement.get_status(StatementStatus::Run), 3);
        assert_eq!(statement.get_status(StatementStatus::RePrepare), 0);
    }
}
