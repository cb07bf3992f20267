//! Commits that go together, with a real server. Two threads whose rows somebody has locked occupy the statements that
//! may be under way, so that the commits of the others wait.

use std::sync::Arc;
use std::time::Duration;

use threadkeep::Error;
use threadkeep::id::ThreadId;
use threadkeep::saver::{CheckpointSelector, ListQuery, Saver, StepCommit};
use threadkeep_testing::proxy::{Cut, Proxy};
use threadkeep_testing::{Database, postgres};
use tokio::task::JoinHandle;
use tokio_postgres::{Client, NoTls};

use self::talk::{Talk, note};
use super::Convoys;
use crate::{Options, PostgresSaver, keys, setup};

#[path = "../../tests/common/talk.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with other tests")]
mod talk;

const FOR_EVER: Duration = Duration::from_mins(10);

/// A saver, its server, and some threads with two checkpoints each.
struct Road {
    database: Database,
    proxy: Proxy,
    saver: Arc<PostgresSaver>,
    other: Client,
    talks: Vec<Talk>,
}

async fn client(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

impl Road {
    async fn new(threads: usize, wait: Duration) -> Self {
        let database = postgres().unwrap().database().await.unwrap();
        setup(database.url(), &Options::patient()).await.unwrap();
        let proxy = Proxy::before(database.url()).await;
        let options = Options::patient();
        let mut saver = PostgresSaver::connect(proxy.url(), options).await.unwrap();
        saver.store.convoys = Convoys::waiting("public", saver.store.connections.clone(), wait);
        let mut talks: Vec<_> = (0..threads).map(|n| Talk::new(&format!("t{n}"))).collect();
        for talk in &mut talks {
            for n in 0..2 {
                let step = talk.say(&note(n));
                saver.commit(step.clone()).await.unwrap();
                talk.accept(&step);
            }
        }
        let other = client(database.url()).await;
        Self { database, proxy, saver: Arc::new(saver), other, talks }
    }

    async fn unlock(&self) {
        self.other.batch_execute("COMMIT").await.unwrap();
    }

    /// The next commit of a thread.
    fn next(&self, n: usize) -> StepCommit {
        self.talks[n].say(&note(2))
    }

    /// Begins to commit.
    fn commit(&self, step: StepCommit) -> JoinHandle<Result<(), Error>> {
        let saver = self.saver.clone();
        tokio::spawn(async move { saver.commit(step).await.map(|_| ()) })
    }

    /// Waits until this many statements wait for a lock.
    async fn blocked(&self, statements: i64) {
        let count = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
        let watch = client(self.database.url()).await;
        while watch.query_one(count, &[]).await.unwrap().get::<_, i64>(0) != statements {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until this many commits wait to be sent.
    async fn waiting(&self, commits: usize) {
        while self.saver.store.convoys.lock().waiting.len() != commits {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Occupies the road: the first two threads are locked, and being committed to.
    async fn jam(&self) -> Vec<JoinHandle<Result<(), Error>>> {
        let locked = [0, 1].map(|n| keys::of_thread(&self.talks[n].thread)).to_vec();
        self.other.batch_execute("BEGIN").await.unwrap();
        let lock = "SELECT 1 FROM threadkeep_thread WHERE id = ANY ($1) FOR UPDATE";
        self.other.query(lock, &[&locked]).await.unwrap();
        let jam = [0, 1].map(|n| self.commit(self.next(n)));
        self.blocked(2).await;
        jam.into()
    }

    async fn length(&self, n: usize) -> usize {
        let fresh = PostgresSaver::connect(self.database.url(), Options::patient()).await.unwrap();
        fresh.list(&ListQuery::new(&self.talks[n].thread)).await.unwrap().len()
    }

    /// The number of transactions that wrote the newest checkpoints of these threads.
    async fn transactions(&self, threads: std::ops::Range<usize>) -> i64 {
        let ids: Vec<_> = threads.map(|n| keys::of_thread(&self.talks[n].thread)).collect();
        let count = "SELECT count(DISTINCT xmin::text) FROM threadkeep_thread WHERE id = ANY ($1)";
        self.other.query_one(count, &[&ids]).await.unwrap().get(0)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commits_that_wait_for_each_other_are_one_transaction() {
    let road = Road::new(10, FOR_EVER).await;
    let jam = road.jam().await;
    let stale = StepCommit { flush: threadkeep::saver::Flush::WithNext, ..road.next(9) };
    // Another process was faster on the last thread.
    let rival = PostgresSaver::connect(road.database.url(), Options::patient()).await.unwrap();
    rival.commit(road.next(9)).await.unwrap();
    let mut commits: Vec<_> = (2..9).map(|n| road.commit(road.next(n))).collect();
    commits.push(road.commit(stale));
    road.waiting(8).await;
    road.unlock().await;
    for (n, commit) in jam.into_iter().chain(commits).enumerate() {
        let done = commit.await.unwrap();
        assert_eq!(matches!(done, Err(Error::Conflict { .. })), n == 9, "{n}: {done:?}");
        assert!(done.is_ok() || n == 9);
        assert_eq!(road.length(n).await, 3, "{n}");
    }
    assert_eq!(road.transactions(2..9).await, 1);
    // What each remembers is correct: its next commit is one request.
    for n in 2..9 {
        let head = road.saver.get(&CheckpointSelector::head(&road.talks[n].thread)).await.unwrap().unwrap();
        let mut talk = Talk::new(road.talks[n].thread.as_str());
        talk.resume(&head);
        let before = road.proxy.requests();
        road.saver.commit(talk.say(&note(3))).await.unwrap();
        assert_eq!(road.proxy.requests(), before + 1);
    }
}

/// A thread that somebody has locked waits for the lock alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_thread_holds_up_no_other() {
    let road = Road::new(7, FOR_EVER).await;
    let locker = client(road.database.url()).await;
    locker.batch_execute("BEGIN").await.unwrap();
    let lock = "SELECT 1 FROM threadkeep_thread WHERE id = $1 FOR UPDATE";
    locker.query(lock, &[&keys::of_thread(&road.talks[6].thread)]).await.unwrap();
    let jam = road.jam().await;
    let mut commits: Vec<_> = (2..7).map(|n| road.commit(road.next(n))).collect();
    road.waiting(5).await;
    road.unlock().await;
    let locked = commits.pop().unwrap();
    for commit in jam.into_iter().chain(commits) {
        commit.await.unwrap().unwrap();
    }
    road.blocked(1).await;
    assert!(!locked.is_finished());
    assert_eq!(road.transactions(2..6).await, 4, "after the refusal each goes alone");
    locker.batch_execute("COMMIT").await.unwrap();
    locked.await.unwrap().unwrap();
    assert_eq!(road.length(6).await, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_has_waited_too_long_goes_alone() {
    let road = Road::new(5, Duration::from_millis(20)).await;
    let jam = road.jam().await;
    for commit in (2..5).map(|n| road.commit(road.next(n))).collect::<Vec<_>>() {
        commit.await.unwrap().unwrap();
    }
    road.blocked(2).await;
    road.unlock().await;
    for commit in jam {
        commit.await.unwrap().unwrap();
    }
    assert!(road.saver.store.convoys.lock().waiting.is_empty());
}

/// The server refuses one of them, and with it the statement.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_server_refuses_takes_nothing_of_the_others_with_it() {
    let road = Road::new(8, FOR_EVER).await;
    let jam = road.jam().await;
    let refused = keys::of_thread(&road.talks[4].thread);
    client(road.database.url())
        .await
        .batch_execute(&format!(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 IF NEW.thread = '{refused}' THEN RAISE 'arranged by the test'; END IF; RETURN NEW;
             END $$;
             CREATE TRIGGER refuse BEFORE INSERT ON threadkeep_checkpoint FOR EACH ROW EXECUTE FUNCTION refuse()"
        ))
        .await
        .unwrap();
    let commits: Vec<_> = (2..8).map(|n| road.commit(road.next(n))).collect();
    road.waiting(6).await;
    road.unlock().await;
    for (n, commit) in (0..).zip(jam.into_iter().chain(commits)) {
        let done = commit.await.unwrap();
        assert_eq!(matches!(done, Err(Error::Unavailable { .. })), n == 4, "{n}: {done:?}");
        assert_eq!(road.length(n).await, if n == 4 { 2 } else { 3 }, "{n}");
    }
}

/// Wherever the connection is cut, each commit happens once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_convoy_whose_answer_is_lost_happens_once() {
    for cut in [Cut::Before, Cut::After] {
        let road = Road::new(6, FOR_EVER).await;
        let jam = road.jam().await;
        let commits: Vec<_> = (2..6).map(|n| road.commit(road.next(n))).collect();
        road.waiting(4).await;
        // The request before it prepares the statement for four commits.
        road.proxy.cut(1, cut);
        road.unlock().await;
        for commit in jam.into_iter().chain(commits) {
            commit.await.unwrap().unwrap();
        }
        assert!(road.proxy.mend());
        for n in 0..6 {
            assert_eq!(road.length(n).await, 3, "{n}");
        }
        // What was carried out before its answer was lost is there as that one transaction wrote it. What was not has
        // been committed again, each alone.
        assert_eq!(road.transactions(2..6).await, if cut == Cut::After { 1 } else { 4 }, "{cut:?}");
    }
}

/// Callers that stop waiting: the others are sent all the same, and what nobody waits for any more is not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_futures_take_nobody_with_them() {
    let road = Road::new(8, FOR_EVER).await;
    let mut jam = road.jam().await;
    let mut commits: Vec<_> = (2..8).map(|n| road.commit(road.next(n))).collect();
    road.waiting(6).await;
    // One that waits, then one that is under way: its place goes to those that wait.
    for leaver in [commits.remove(0), jam.remove(0)] {
        leaver.abort();
        assert!(leaver.await.unwrap_err().is_cancelled());
    }
    for commit in commits {
        commit.await.unwrap().unwrap();
    }
    assert_eq!(road.transactions(3..8).await, 1);
    assert_eq!(road.length(2).await, 2, "nothing was sent for it");
    road.unlock().await;
    // Its thread can be written to again, whatever became of the statement.
    let thread: ThreadId = road.talks[0].thread.clone();
    let head = road.saver.get(&CheckpointSelector::head(&thread)).await.unwrap().unwrap();
    let mut talk = Talk::new(thread.as_str());
    talk.resume(&head);
    match road.saver.commit(talk.say(&note(3))).await {
        // The statement was carried out only after the head was read.
        Err(Error::Conflict { .. }) => {}
        done => drop(done.unwrap()),
    }
    // Everything is free again.
    for n in 2..8 {
        let head = road.saver.get(&CheckpointSelector::head(&road.talks[n].thread)).await.unwrap().unwrap();
        let mut talk = Talk::new(road.talks[n].thread.as_str());
        talk.resume(&head);
        road.saver.commit(talk.say(&note(4))).await.unwrap();
    }
}

/// The whole convoy is given up while its statement is under way: its place is free for the next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_convoy_that_everybody_left_gives_up_its_place() {
    let road = Road::new(6, FOR_EVER).await;
    let jam = road.jam().await;
    let commits: Vec<_> = (2..4).map(|n| road.commit(road.next(n))).collect();
    road.waiting(2).await;
    road.proxy.statements();
    // On a connection that is opened for it: the first request asks who answers, the next one prepares the statement.
    let (came, _held) = road.proxy.hold(2);
    // Its place goes to the two, whose statement does not reach the server.
    jam[0].abort();
    came.notified().await;
    let prepared = road.proxy.statements();
    assert!(matches!(&prepared[..], [_, convoy] if convoy.contains("$48)")), "{prepared:?}");
    for commit in &commits {
        commit.abort();
    }
    road.commit(road.next(4)).await.unwrap().unwrap();
    for n in 2..4 {
        assert_eq!(road.length(n).await, 2, "nothing was carried out for it");
    }
    road.unlock().await;
}
