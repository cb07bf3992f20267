//! Whether others work on the database: a command leaves the server to them half of the time.

use tokio_postgres::types::Type;

use threadkeep::Result;

use crate::config::COMMAND;
use crate::error::Trouble;
use crate::rows::column;
use crate::store::Store;

/// `$1`, the end of a command's name: whether a session with another name does something, or did within the last second. Of
/// sessions of other roles the server may not say that; they count.
pub(crate) const SERVING: &str = "SELECT EXISTS (
    SELECT FROM pg_catalog.pg_stat_activity a
    WHERE a.datname = pg_catalog.current_database()
    AND coalesce(a.backend_type, 'client backend') = 'client backend'
    AND pg_catalog.right(a.application_name, pg_catalog.length($1)) <> $1
    AND (coalesce(a.state, '') <> 'idle' OR a.state_change > pg_catalog.clock_timestamp() - interval '1 second')
)";

impl Store {
    /// See [`crate::PostgresSaver::is_serving`].
    pub(crate) async fn is_serving(&self) -> Result<bool, Trouble> {
        let rows = self.query(&self.sql.serving, &[(&COMMAND, Type::TEXT)]).await?;
        Ok(rows.first().map(|row| column(row, 0)).transpose()?.unwrap_or_default())
    }
}
