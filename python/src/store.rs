//! A store as Python holds it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::Value as Json;
use threadkeep_langgraph::{
    Caller, Fence, LangGraph, ListRequest, Place, Put, PutWrites, Strategy, moved, stored,
};
use threadkeep_memory::MemorySaver;

use crate::call::Call;
use crate::codec::Codec;
use crate::errors::{StaleError, exception};
use crate::put::{frame, keys, labels, metadata};
use crate::raw::Output;
use crate::runtime;
use crate::shared::{Kind, Shared};

/// A checkpoint of LangGraph's own savers, to be put.
#[pyclass(frozen)]
pub(crate) struct MovedPut(Put);

/// A store. Its methods return calls; nothing happens before they are waited for.
#[pyclass(frozen)]
pub(crate) struct Store(Arc<Shared>);

impl Store {
    fn new(kind: Kind, fence: &str) -> PyResult<Self> {
        let fence = match fence {
            "fork" => Fence::Fork,
            "error" => Fence::Error,
            other => {
                return Err(PyValueError::new_err(format!("fence is \"fork\" or \"error\", not {other:?}")));
            }
        };
        Ok(Self(Shared::new(kind, fence)))
    }

    /// A call on the open store.
    fn call<F>(&self, call: impl FnOnce(Arc<LangGraph>) -> F + Send + 'static) -> Call
    where
        F: Future<Output = threadkeep::Result<Output>> + Send + 'static,
    {
        let shared = self.0.clone();
        Call::new(async move { shared.call(call).await })
    }
}

/// Whose call it is: whether a run's, and the number of the run, or of its thread or task. That is the address of the
/// object, which is held until the call ends: a call goes on if its task is cancelled, and what comes next must not get
/// the number.
type Given = (bool, u64, Py<PyAny>);

fn called_by((is_run, number, held): Given) -> (Caller, Py<PyAny>) {
    (if is_run { Caller::Run(number) } else { Caller::Other(number) }, held)
}

#[pymethods]
impl Store {
    /// A store in memory.
    #[staticmethod]
    fn memory(fence: &str) -> PyResult<Self> {
        Self::new(Kind::Memory(MemorySaver::default()), fence)
    }

    /// A store in an SQLite file, and how many milliseconds it waits for locks, if it is not the default.
    #[staticmethod]
    #[pyo3(signature = (path, fence, busy_timeout=None))]
    fn sqlite(path: String, fence: &str, busy_timeout: Option<u32>) -> PyResult<Self> {
        let default = threadkeep_sqlite::Options::default();
        let busy_timeout = busy_timeout.map_or(default.busy_timeout, |ms| Duration::from_millis(ms.into()));
        Self::new(Kind::Sqlite(path, threadkeep_sqlite::Options { busy_timeout, ..default }), fence)
    }

    /// A store in a Postgres database.
    #[staticmethod]
    fn postgres(address: String, schema: String, fence: &str) -> PyResult<Self> {
        let options = threadkeep_postgres::Options { schema, ..threadkeep_postgres::Options::default() };
        Self::new(Kind::Postgres(address, options), fence)
    }

    /// Opens the store; creates its tables.
    fn setup(&self) -> Call {
        let shared = self.0.clone();
        Call::new(async move { shared.setup().await.map(|()| Output::Nothing) })
    }

    /// Closes the store. Later calls fail.
    fn close(&self) -> Call {
        let shared = self.0.clone();
        Call::new(async move {
            shared.close().await;
            Ok(Output::Nothing)
        })
    }

    /// A call that a put has to wait for first, if its parent is not known.
    fn learn(&self, thread: &str, namespace: &str, parent: &str) -> PyResult<Option<Call>> {
        let place = Place::new(thread, namespace);
        let parent = place.id(parent).map_err(exception)?;
        let known = self.0.known().map_err(exception)?.and_then(|graphs| {
            graphs.needs(&place, Some(parent), &BTreeMap::new(), &BTreeSet::new(), std::iter::empty())
        });
        Ok(known.is_none().then(|| {
            self.call(
                move |graphs| async move { graphs.learn(&place, parent).await.map(|()| Output::Nothing) },
            )
        }))
    }

    #[expect(clippy::too_many_arguments, reason = "LangGraph's, and its place in pieces")]
    fn put(
        &self,
        thread: &str,
        namespace: &str,
        parent: Option<&str>,
        seen: Option<&str>,
        caller: Given,
        checkpoint: &Bound<'_, PyDict>,
        metadata_json: &[u8],
        new_versions: &Bound<'_, PyDict>,
        codec: &Codec,
    ) -> PyResult<Call> {
        let place = Place::new(thread, namespace);
        let id = |text: &str| place.id(text).map_err(exception);
        let parent = parent.map(id).transpose()?;
        let required = |key: &str| {
            checkpoint
                .get_item(key)?
                .ok_or_else(|| PyValueError::new_err(format!("the checkpoint has no {key:?}")))
        };
        let given = required("channel_values")?;
        // A copy: serializers run Python, which may change the dictionary.
        let given = given.cast::<PyDict>()?.copy()?;
        let versions = match checkpoint.get_item("channel_versions")? {
            Some(versions) => labels(versions.cast::<PyDict>()?)?,
            None => BTreeMap::new(),
        };
        let new = keys(new_versions)?;
        let all = keys(&given)?;
        let needed = match self.0.known().map_err(exception)? {
            Some(graphs) => graphs.needs(&place, parent, &versions, &new, all.iter().cloned()),
            // Without a parent nothing is held.
            None => parent.is_none().then(|| all.clone()),
        };
        let needed = needed.ok_or_else(|| StaleError::new_err("the parent is not known: learn it first"))?;
        let (mut values, mut snapshots, mut held) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        for (channel, value) in given {
            let channel: String = channel.extract()?;
            if !needed.contains(&channel) {
                held.insert(channel);
                continue;
            }
            let snapshot = value.is_instance(codec.snapshot.bind(value.py()))?;
            let value = if snapshot { value.getattr("value")? } else { value };
            let at = (place.clone(), channel);
            let encoded = codec.encode(&value, Some(&at))?;
            let (_, channel) = at;
            if snapshot {
                snapshots.insert(channel.clone());
            }
            values.insert(channel, encoded);
        }
        let put = Put {
            id: id(&required("id")?.extract::<String>()?)?,
            parent,
            seen: seen.map(id).transpose()?,
            frame: frame(checkpoint, codec)?,
            versions,
            new,
            values,
            held,
            snapshots,
            metadata: metadata(metadata_json)?,
            place,
        };
        let (caller, held) = called_by(caller);
        let call = self.call(move |graphs| async move {
            graphs.called_by(caller).put(&put).await.map(|()| Output::Nothing)
        });
        Ok(call.holding(held))
    }

    #[expect(clippy::too_many_arguments, reason = "LangGraph's, and its place in pieces")]
    fn put_writes(
        &self,
        thread: &str,
        namespace: &str,
        id: &str,
        caller: Given,
        writes: Vec<Bound<'_, PyAny>>,
        task: String,
        path: String,
        codec: &Codec,
    ) -> PyResult<Call> {
        let place = Place::new(thread, namespace);
        let mut encoded = Vec::with_capacity(writes.len());
        for write in writes {
            // A pair is a list where LangGraph's cache of nodes read it.
            let [channel, value]: [Bound<'_, PyAny>; 2] = write.extract()?;
            encoded.push((channel.extract()?, codec.encode(&value, None)?));
        }
        let id = place.id(id).map_err(exception)?;
        let put = PutWrites { place, id, task, path, writes: encoded };
        let (caller, held) = called_by(caller);
        let call = self.call(move |graphs| async move {
            graphs.called_by(caller).put_writes(&put).await.map(|()| Output::Nothing)
        });
        Ok(call.holding(held))
    }

    fn get(&self, thread: &str, namespace: &str, id: Option<&str>, caller: Given) -> PyResult<Call> {
        let place = Place::new(thread, namespace);
        let id = id.map(|id| place.id(id).map_err(exception)).transpose()?;
        let (caller, held) = called_by(caller);
        let call = self.call(move |graphs| async move {
            graphs.called_by(caller).get(&place, id).await.map(|found| Output::Tuple(found.map(Box::new)))
        });
        Ok(call.holding(held))
    }

    #[expect(clippy::too_many_arguments, reason = "LangGraph's, and its place in pieces")]
    fn list(
        &self,
        thread: Option<&str>,
        namespace: Option<&str>,
        id: Option<&str>,
        before: Option<&str>,
        limit: Option<usize>,
        filter_json: &[u8],
        caller: Given,
    ) -> PyResult<Call> {
        let place = Place::new(thread.unwrap_or_default(), "");
        let parse = |id: Option<&str>| id.map(|id| place.id(id).map_err(exception)).transpose();
        let request = ListRequest {
            id: parse(id)?,
            before: parse(before)?,
            thread: thread.map(Into::into),
            namespace: namespace.map(Into::into),
            limit,
            filter: metadata(filter_json)?,
        };
        let (caller, held) = called_by(caller);
        let call = self.call(move |graphs| async move {
            graphs.called_by(caller).list(&request).await.map(Output::Tuples)
        });
        Ok(call.holding(held))
    }

    fn history(
        &self,
        thread: &str,
        namespace: &str,
        id: Option<&str>,
        channels: BTreeSet<String>,
    ) -> PyResult<Call> {
        let place = Place::new(thread, namespace);
        let id = id.map(|id| place.id(id).map_err(exception)).transpose()?;
        Ok(self.call(move |graphs| async move {
            graphs.history(&place, id, &channels).await.map(Output::History)
        }))
    }

    /// The checkpoints of a thread, by namespace and id, and the tasks with writes under each: special ones, or others.
    fn written(&self, thread: &str) -> Call {
        let thread = thread.into();
        self.call(move |graphs| async move { graphs.written(&thread).await.map(Output::Written) })
    }

    fn delete_thread(&self, thread: &str) -> Call {
        let thread = thread.into();
        self.call(move |graphs| async move { graphs.delete_thread(&thread).await.map(|()| Output::Nothing) })
    }

    /// Deletes a thread that has only these checkpoints, by namespace and id, with writes of these tasks. Returns whether
    /// nothing of it is left.
    fn take_back(&self, thread: &str, put: BTreeMap<(String, String), BTreeSet<String>>) -> PyResult<Call> {
        let id = |namespace: &str, id: &str| Place::new(thread, namespace).id(id).map_err(exception);
        let put = put.into_iter().map(|((namespace, of), tasks)| {
            let id = id(&namespace, &of)?;
            Ok(((namespace.as_str().into(), id), tasks))
        });
        let put = put.collect::<PyResult<BTreeMap<_, _>>>()?;
        let thread = thread.into();
        Ok(self.call(move |graphs| async move { graphs.take_back(&thread, &put).await.map(Output::Flag) }))
    }

    fn delete_for_runs(&self, runs: BTreeSet<String>) -> Call {
        self.call(move |graphs| async move { graphs.delete_for_runs(&runs).await.map(|()| Output::Nothing) })
    }

    fn copy_thread(&self, from: &str, to: &str) -> Call {
        let (from, to) = (from.into(), to.into());
        self.call(move |graphs| async move { graphs.copy_thread(&from, &to).await.map(|()| Output::Nothing) })
    }

    fn prune(&self, threads: Vec<String>, strategy: &str) -> PyResult<Call> {
        let strategy = match strategy {
            "keep_latest" => Strategy::KeepLatest,
            "delete" => Strategy::Delete,
            other => {
                let text = format!("strategy is \"keep_latest\" or \"delete\", not {other:?}");
                return Err(PyValueError::new_err(text));
            }
        };
        let threads: Vec<_> = threads.into_iter().map(Into::into).collect();
        Ok(self.call(move |graphs| async move {
            graphs.prune(&threads, strategy).await.map(|()| Output::Nothing)
        }))
    }

    /// A checkpoint of LangGraph's own savers, cut apart: of the SQLite saver if it has a tag.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "the columns of a row")]
    fn moved(
        thread: &str,
        namespace: &str,
        id: &str,
        parent: Option<&str>,
        tag: &str,
        checkpoint: &[u8],
        values: Vec<(String, String, Vec<u8>)>,
        metadata_json: &[u8],
    ) -> PyResult<MovedPut> {
        let place = Place::new(thread, namespace);
        let id = place.id(id).map_err(exception)?;
        let parent = parent.map(|parent| place.id(parent).map_err(exception)).transpose()?;
        let given = metadata(metadata_json)?;
        let put = if tag.is_empty() {
            let values =
                values.into_iter().map(|(channel, tag, bytes)| (channel, tag, bytes.into())).collect();
            moved::from_json(place, id, parent, metadata(checkpoint)?, values, given)
        } else {
            moved::from_map(place, id, parent, &Bytes::copy_from_slice(checkpoint), given)
        };
        Ok(MovedPut(put.map_err(exception)?))
    }

    /// Stores it.
    fn put_moved(&self, moved: &MovedPut) -> Call {
        let put = moved.0.clone();
        self.call(move |graphs| async move { graphs.put_moved(&put).await.map(|()| Output::Nothing) })
    }

    /// Stores writes of LangGraph's own savers.
    fn put_moved_writes(
        &self,
        thread: &str,
        namespace: &str,
        id: &str,
        task: String,
        path: String,
        writes: Vec<(String, String, Vec<u8>)>,
    ) -> PyResult<Call> {
        let place = Place::new(thread, namespace);
        let id = place.id(id).map_err(exception)?;
        let writes =
            writes.into_iter().map(|(channel, tag, bytes)| Ok((channel, stored(&tag, bytes.into())?)));
        let writes = writes.collect::<threadkeep::Result<_>>().map_err(exception)?;
        let put = PutWrites { place, id, task, path, writes };
        Ok(self.call(move |graphs| async move { graphs.put_writes(&put).await.map(|()| Output::Nothing) }))
    }

    /// The version after `current`.
    #[staticmethod]
    fn next_version(current: Option<&str>) -> PyResult<String> {
        // After a fork that Python does not know of, it lets this thread draw numbers of its own.
        runtime::current()?;
        Ok(threadkeep_langgraph::next(current.map(|text| Json::String(text.to_owned())).as_ref()))
    }
}
