//! Work on a long thread is done on a thread of its own.

use std::sync::{Arc, mpsc};

use threadkeep::id::ThreadId;
use threadkeep::saver::{Revision, Rewrite, Saver};
use tokio::task::{JoinHandle, spawn_blocking};

use crate::common::talk::{Talk, message};
use crate::common::{database, open};

/// Checkpoints of the long thread.
const LONG: usize = 510;
/// Commits to another thread meanwhile.
const MEANWHILE: usize = 300;

/// The runtime has one thread for tasks and one for such work. As long as that one is taken, a call on a long thread cannot
/// end, and commits to others do.
#[test]
fn calls_on_a_long_thread_keep_no_other_task_waiting() {
    let runtime =
        tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).enable_all().build().unwrap();
    runtime.block_on(async {
        let database = database().await;
        let saver = Arc::new(open(database.url()).await);
        let mut long = Talk::new("long");
        for n in 0..LONG {
            let step = long.say(&message(n, 20));
            saver.commit(step.clone()).await.unwrap();
            long.accept(&step);
        }
        let mut short = Talk::new("short");
        let (thread, copy) = (long.thread.clone(), ThreadId::from("copy"));

        let (free, taken) = mpsc::channel();
        let holder = spawn_blocking(move || taken.recv());
        let reading = tokio::spawn({
            let saver = saver.clone();
            async move { saver.read_thread(&thread).await.unwrap() }
        });
        go_on(&*saver, &mut short, &reading).await;
        free.send(()).unwrap();
        holder.await.unwrap().unwrap();
        let mut image = reading.await.unwrap();
        assert_eq!(image.checkpoints.len(), LONG);

        let (free, taken) = mpsc::channel();
        let holder = spawn_blocking(move || taken.recv());
        image.checkpoints.values_mut().for_each(|tuple| tuple.thread = copy.clone());
        let rewrite = Rewrite { put: image.checkpoints.into_values().collect(), ..Rewrite::default() };
        let copying = tokio::spawn({
            let (saver, copy) = (saver.clone(), copy.clone());
            async move { saver.rewrite_thread(&copy, &Revision::absent(), rewrite).await.unwrap() }
        });
        go_on(&*saver, &mut short, &copying).await;
        free.send(()).unwrap();
        holder.await.unwrap().unwrap();
        copying.await.unwrap();
        assert_eq!(saver.read_thread(&copy).await.unwrap().checkpoints.len(), LONG);
    });
}

/// Commits, while `call` is under way.
async fn go_on<T>(saver: &dyn Saver, short: &mut Talk, call: &JoinHandle<T>) {
    for n in 0..MEANWHILE {
        let step = short.say(&message(n, 20));
        saver.commit(step.clone()).await.unwrap();
        short.accept(&step);
    }
    assert!(!call.is_finished(), "it was done where commits are");
}
