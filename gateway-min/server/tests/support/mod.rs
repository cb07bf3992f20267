//! A gateway in this process, on its own directory, and JSON requests to it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Method, Request, Response};
use rusqlite::{Connection, OpenFlags};
use serde_json::{Value, json};
use tempfile::TempDir;
use threadkeep::mode::ModeRegister;
use threadkeep_config::{ConfigHandle, Environment, LoadOptions};
use threadkeep_gateway::app::App;
use threadkeep_gateway::http;
use threadkeep_testing::Database;
use tokio_postgres::NoTls;
use tower::ServiceExt as _;

/// The channel modes of a thread.
pub(crate) const MODES: [&str; 2] = ["full", "delta"];
/// The backends that outlive the process.
pub(crate) const DURABLE: [&str; 2] = ["sqlite", "postgres"];
/// Every mode on every backend.
pub(crate) const ALL: [(&str, &str); 6] = [
    ("memory", "full"),
    ("memory", "delta"),
    ("sqlite", "full"),
    ("sqlite", "delta"),
    ("postgres", "full"),
    ("postgres", "delta"),
];

/// The configuration of a gateway.
#[derive(Clone)]
pub(crate) struct Setup {
    /// `database.backend`
    pub(crate) backend: &'static str,
    /// `database.checkpoint_channel_mode`
    pub(crate) mode: &'static str,
    /// `database.checkpoint_delta.snapshot_frequency`
    pub(crate) frequency: u64,
    /// `run_events.backend`
    pub(crate) events: &'static str,
    /// The script of the model `m`.
    pub(crate) script: Value,
    /// Environment variables.
    pub(crate) variables: Vec<(&'static str, String)>,
    /// Further configuration sections, merged over the others.
    pub(crate) sections: Value,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            backend: "memory",
            mode: "full",
            frequency: 3,
            events: "db",
            script: json!({"rules": [{"answers": [
                {"text": "You said: {{input}}", "usage": {"input_tokens": 3, "output_tokens": 4}},
            ]}]}),
            variables: Vec::new(),
            sections: json!({}),
        }
    }
}

impl Setup {
    /// The default on this backend in this mode.
    pub(crate) fn on(backend: &'static str, mode: &'static str) -> Self {
        Self { backend, mode, ..Self::default() }
    }

    /// Starts it in a new directory.
    pub(crate) async fn start(self) -> Gateway {
        let database = match self.backend {
            "postgres" => Some(Arc::new(threadkeep_testing::postgres().unwrap().database().await.unwrap())),
            _ => None,
        };
        Gateway::open(TempDir::new().unwrap(), self, database).await
    }

    /// Starts it in a new directory on this Postgres database.
    pub(crate) async fn start_on(self, database: Database) -> Gateway {
        Gateway::open(TempDir::new().unwrap(), self, Some(Arc::new(database))).await
    }
}

/// A running gateway.
pub(crate) struct Gateway {
    setup: Setup,
    app: Arc<App>,
    router: Router,
    dir: TempDir,
    /// The database of a gateway on Postgres.
    database: Option<Arc<Database>>,
}

/// The answer to a request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    /// Null if it was empty, a string if it was not JSON.
    pub(crate) body: Value,
}

impl Answer {
    /// The body of a success.
    #[track_caller]
    pub(crate) fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.body
    }

    /// Checks that this is an error with this text.
    #[track_caller]
    pub(crate) fn refused(&self, status: u16, detail: &str) {
        assert_eq!((self.status, self.body["detail"].as_str()), (status, Some(detail)), "{}", self.body);
    }

    /// Checks that this is a 422 with one problem of this type at this place.
    #[track_caller]
    pub(crate) fn invalid(&self, kind: &str, loc: &Value) {
        let problems = self.body["detail"].as_array();
        let found = problems.map(|list| list.iter().map(|p| (&p["type"], &p["loc"])).collect::<Vec<_>>());
        assert_eq!((self.status, found), (422, Some(vec![(&json!(kind), loc)])), "{}", self.body);
    }
}

impl Gateway {
    async fn open(dir: TempDir, setup: Setup, database: Option<Arc<Database>>) -> Self {
        std::fs::write(dir.path().join("script.json"), setup.script.to_string()).unwrap();
        write_config(dir.path(), &setup, database.as_deref());
        let app = App::start(load(dir.path(), &setup), Arc::new(ModeRegister::new())).await.unwrap();
        Self { setup, router: http::router(Arc::clone(&app)), app, dir, database }
    }

    /// Stops it and starts another on the same directory, in this mode.
    pub(crate) async fn reopen(self, mode: &'static str) -> Self {
        self.reopen_after(mode, |_| async {}).await
    }

    /// As [`Self::reopen`], with `meanwhile` done to the files between.
    pub(crate) async fn reopen_after<F: Future<Output = ()>>(
        self,
        mode: &'static str,
        meanwhile: impl FnOnce(PathBuf) -> F,
    ) -> Self {
        // On a machine that stands still it gives up too early. Once everything has stopped it returns at once.
        for _ in 0..12 {
            self.app.stop_runs().await;
        }
        self.app.close().await;
        meanwhile(self.data()).await;
        Self::open(self.dir, Setup { mode, ..self.setup }, self.database).await
    }

    /// Starts another on the directory of this one, whose tasks died without stopping.
    pub(crate) async fn reopen_dead(self) -> Self {
        drop((self.router, self.app));
        Self::open(self.dir, self.setup, self.database).await
    }

    /// Starts another one, with its own directory, on the database of this one.
    pub(crate) async fn beside(&self) -> Self {
        Self::open(TempDir::new().unwrap(), self.setup.clone(), self.database.clone()).await
    }

    /// A new connection to its Postgres database.
    pub(crate) async fn postgres(&self) -> tokio_postgres::Client {
        let database = self.database.as_ref().unwrap();
        let (client, connection) = tokio_postgres::connect(database.url(), NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    }

    /// Serves it at an address.
    pub(crate) async fn listen(&self) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = self.router.clone();
        tokio::spawn(async move { axum::serve(listener, router).await });
        address
    }

    /// Edits the configuration file while the gateway runs.
    pub(crate) fn reconfigure(&mut self, edit: impl FnOnce(&mut Setup)) {
        edit(&mut self.setup);
        write_config(self.dir.path(), &self.setup, self.database.as_deref());
    }

    /// Its routes, to be served on a socket.
    pub(crate) fn router(&self) -> Router {
        self.router.clone()
    }

    /// Its configuration, for another process on its store.
    pub(crate) fn config(&self) -> ConfigHandle {
        load(self.dir.path(), &self.setup)
    }

    /// Where the database files are.
    pub(crate) fn data(&self) -> PathBuf {
        self.dir.path().join("state/data")
    }

    /// The working directory of a thread.
    pub(crate) fn thread_dir(&self, thread: &str) -> PathBuf {
        self.dir.path().join("state/threads").join(thread)
    }

    /// Sends a request whose answer is read piece by piece.
    pub(crate) async fn open_answer(&self, request: Request<Body>) -> Response<Body> {
        self.router.clone().oneshot(request).await.unwrap()
    }

    /// Sends a request.
    pub(crate) async fn send(&self, request: Request<Body>) -> Answer {
        let (parts, body) = self.open_answer(request).await.into_parts();
        let bytes = to_bytes(body, usize::MAX).await.unwrap();
        let body = if bytes.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(&bytes).unwrap_or_else(|_| String::from_utf8_lossy(&bytes).into())
        };
        Answer { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    /// Sends a request of this method, with a JSON body if there is one.
    pub(crate) async fn call(&self, method: Method, path: &str, body: Option<Value>) -> Answer {
        let request = Request::builder().method(method).uri(path);
        let request = match body {
            Some(body) => request.header("content-type", "application/json").body(body.to_string().into()),
            None => request.body(Body::empty()),
        };
        self.send(request.unwrap()).await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, None).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        self.call(Method::POST, path, Some(body)).await
    }

    pub(crate) async fn patch(&self, path: &str, body: Value) -> Answer {
        self.call(Method::PATCH, path, Some(body)).await
    }

    pub(crate) async fn delete(&self, path: &str) -> Answer {
        self.call(Method::DELETE, path, None).await
    }

    /// Creates a thread.
    pub(crate) async fn create(&self, thread: &str) {
        self.post("/api/threads", json!({ "thread_id": thread })).await.ok();
    }

    /// Runs a turn that asks `text` and waits for its last write; returns the run's id.
    pub(crate) async fn ask(&self, thread: &str, text: &str) -> String {
        let answer = self.post(&format!("/api/threads/{thread}/runs/wait"), question(text)).await;
        let place = answer.headers.get("content-location").cloned();
        // A refusal says why.
        answer.ok();
        let place = place.unwrap().to_str().unwrap().to_owned();
        place.rsplit_once('/').unwrap().1.to_owned()
    }

    /// Runs a turn of another agent that asks `text`, and waits for its last write.
    pub(crate) async fn ask_as(&self, thread: &str, agent: &str, text: &str) {
        threadkeep_gateway::testing::turn_of(&self.app, thread, agent, text).await.unwrap();
    }

    /// Starts a background run; returns its id.
    pub(crate) async fn start_run(&self, thread: &str, text: &str) -> String {
        let run = self.post(&format!("/api/threads/{thread}/runs"), question(text)).await.ok();
        run["run_id"].as_str().unwrap().to_owned()
    }

    /// The record of a run.
    pub(crate) async fn run(&self, thread: &str, run: &str) -> Value {
        self.get(&format!("/api/threads/{thread}/runs/{run}")).await.ok()
    }

    /// Waits for the last write of a run.
    pub(crate) async fn join(&self, thread: &str, run: &str) {
        self.get(&format!("/api/threads/{thread}/runs/{run}/join")).await.ok();
    }

    /// The state of a thread at its head.
    pub(crate) async fn state(&self, thread: &str) -> Value {
        self.get(&format!("/api/threads/{thread}/state")).await.ok()
    }

    /// The newest hundred entries of a thread's history.
    pub(crate) async fn history(&self, thread: &str) -> Vec<Value> {
        let entries = self.post(&format!("/api/threads/{thread}/history"), json!({"limit": 100})).await.ok();
        entries.as_array().unwrap().clone()
    }

    /// The number of rows of each table of both SQLite files, or of their counterparts in Postgres.
    pub(crate) async fn rows(&self) -> BTreeMap<String, i64> {
        let mut counts = BTreeMap::new();
        if self.database.is_some() {
            let client = self.postgres().await;
            let sql = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'";
            for table in client.query(sql, &[]).await.unwrap() {
                let table: String = table.get(0);
                let count = client.query_one(&format!("SELECT COUNT(*) FROM {table}"), &[]).await.unwrap();
                let name = match table.strip_prefix("threadkeep_gateway_") {
                    Some(records) => format!("gateway.db.{records}"),
                    None => format!("checkpoints.db.{table}"),
                };
                counts.insert(name, count.get(0));
            }
            return counts;
        }
        for file in ["gateway.db", "checkpoints.db"] {
            let db = connect(&self.data().join(file));
            let mut tables = db.prepare("SELECT name FROM sqlite_schema WHERE type = 'table'").unwrap();
            for table in tables.query_map([], |row| row.get::<_, String>(0)).unwrap() {
                let table = table.unwrap();
                let sql = format!("SELECT COUNT(*) FROM \"{table}\"");
                let count = db.query_row(&sql, [], |row| row.get(0)).unwrap();
                counts.insert(format!("{file}.{table}"), count);
            }
        }
        counts
    }
}

/// A new connection to a database file. It writes page checksums where the file has them: a gateway has registered the
/// VFS by now. It waits for the gateway's writer, which may take its time on a busy machine.
pub(crate) fn connect(file: &Path) -> Connection {
    let vfs = if file.ends_with("checkpoints.db") { c"threadkeep-pages" } else { c"unix" };
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE;
    let connection = Connection::open_with_flags_and_vfs(file, flags, vfs).unwrap();
    connection.busy_timeout(Duration::from_mins(10)).unwrap();
    connection
}

/// The body of a run create request that asks `text`.
pub(crate) fn question(text: &str) -> Value {
    json!({"input": {"messages": [{"role": "user", "content": text}]}})
}

/// A message.
pub(crate) fn says(kind: &str, id: &str, text: &str) -> Value {
    json!({"type": kind, "id": id, "content": text})
}

/// The contents of the messages of a state or history entry.
pub(crate) fn texts(state: &Value) -> Vec<&str> {
    let messages = state["values"]["messages"].as_array().unwrap();
    messages.iter().map(|message| message["content"].as_str().unwrap()).collect()
}

/// The id of a state's or history entry's checkpoint.
pub(crate) fn id(state: &Value) -> &str {
    state["checkpoint_id"].as_str().unwrap()
}

/// The configuration in this directory.
fn load(dir: &Path, setup: &Setup) -> ConfigHandle {
    let home = ("SVC_HOME", dir.join("state").display().to_string());
    let options = LoadOptions {
        config_path: None,
        environment: setup.variables.iter().cloned().chain([home]).collect::<Environment>(),
        working_dir: dir.to_owned(),
    };
    ConfigHandle::open(&options).unwrap()
}

fn write_config(dir: &Path, setup: &Setup, database: Option<&Database>) {
    let mut config = json!({
        "config_version": 49,
        "database": {
            "backend": setup.backend,
            "checkpoint_channel_mode": setup.mode,
            "checkpoint_delta": {"snapshot_frequency": setup.frequency},
            "sqlite_synchronous": "normal",
            "postgres_url": database.map(Database::url),
        },
        "run_events": {"backend": setup.events},
        "models": [{"name": "m", "use": "scripted", "model": "m", "script": "script.json"}],
    });
    config.as_object_mut().unwrap().extend(setup.sections.as_object().unwrap().clone());
    std::fs::write(dir.join("config.yaml"), config.to_string()).unwrap();
}
