//! `threadkeep checkpoints show`: one checkpoint as it is stored.

use serde_json::{Value as Json, json};
use threadkeep::checkpoint::{Stored, TaskWrites};
use threadkeep::id::{ChannelName, CheckpointId};
use threadkeep::value::ChannelValue;

use super::line::{Newer, lines, own_metadata, stored_at};
use super::{At, TEXT_CHARS, as_json, list_or_dash, marked_mode, shown_source};
use crate::error::{OpsError, Result};
use crate::output::{Columns, Out, bytes, count, cut, moment, one_line, or_dash};
use crate::target::Target;
use crate::threads::namespace_name;

pub(super) async fn run(target: &Target, out: &mut Out, id: Option<CheckpointId>, at: &At) -> Result<()> {
    let (thread, namespace) = at.place();
    let id = target.checkpoint(&thread, &namespace, id).await?;
    let Some(tuple) = stored_at(target, &thread, &namespace, id).await? else {
        // It was deleted between the two reads.
        return Err(OpsError::NoCheckpoint { thread, checkpoint: id, near: String::new() });
    };
    let mut newer = Newer::than(target, &thread, Some(&namespace), id).await?;
    let Some(line) = lines(target, std::slice::from_ref(&tuple), &mut newer).await?.pop() else {
        return Ok(());
    };
    let tuple = &tuple;
    let of_children = newer.children(tuple);
    let mut children: Vec<String> = of_children
        .map(|children| children.ids.iter().map(ToString::to_string).collect())
        .unwrap_or_default();
    children.sort();
    let is_pending =
        |row: &TaskWrites| of_children.is_none_or(|children| !children.applied.contains(&row.task));
    if at.json {
        let mut document = as_json(tuple, &line);
        let channels = tuple.checkpoint.channels.iter().map(|(name, entry)| {
            let value = entry.stored.value();
            let about = json!({
                "version": entry.version.to_string(), "stored": stored(&entry.stored),
                "bytes": value.map(ChannelValue::encoded_len), "elements": value.and_then(elements),
            });
            (name.to_string(), about)
        });
        let rows = tuple.writes.iter().map(|row| {
            let writes = row.writes.iter().map(|write| {
                json!({"channel": write.channel.as_str(), "overwrite": write.overwrite, "bytes": write.value.encoded_len()})
            });
            json!({
                "task": row.task.to_string(), "node": row.node.as_str(), "index": row.index,
                "pending": is_pending(row), "writes": writes.collect::<Vec<_>>(),
            })
        });
        let more = json!({
            "children": children, "metadata": tuple.metadata.to_json(),
            "applied": tuple.checkpoint.applied.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "channels": Json::Object(channels.collect()), "rows": rows.collect::<Vec<_>>(),
        });
        if let (Some(document), Json::Object(more)) = (document.as_object_mut(), more) {
            document.extend(more);
        }
        out.json(&document)?;
        return Ok(());
    }
    for (name, text) in [
        ("checkpoint", id.to_string()),
        ("time", moment(id)),
        ("namespace", namespace_name(&namespace)),
        ("parent", or_dash(tuple.parent)),
        ("children", list_or_dash(&children).replace('+', ", ")),
        ("source", shown_source(tuple)),
        ("step", tuple.metadata.step.to_string()),
        ("made by", list_or_dash(&line.by)),
        ("next", list_or_dash(&tuple.checkpoint.next)),
        ("mode", marked_mode(tuple)),
        ("messages", line.messages.map_or_else(|| "?".to_owned(), count)),
        ("metadata", Json::Object(own_metadata(tuple).to_json()).to_string()),
    ] {
        out.line(format!("{name:<11} {}", cut(&text, TEXT_CHARS, "--json shows them")))?;
    }
    for (key, map) in tuple.metadata.extra.split().1 {
        let entries = count(map.len());
        out.line(format!("            {}: {entries} entries (--json shows them)", one_line(&key)))?;
    }
    out.line("")?;
    let mut table = Columns::new(&["CHANNEL", "STORED", "ELEMENTS>", "BYTES>", "VERSION"]);
    for (name, entry) in &tuple.checkpoint.channels {
        let value = entry.stored.value();
        table.row([
            name.to_string(),
            stored(&entry.stored).to_owned(),
            or_dash(value.and_then(elements).map(count)),
            or_dash(value.map(|value| bytes(value.encoded_len() as u64))),
            format!("{:?}", entry.version),
        ]);
    }
    out.table_or(&table, "It holds no channels.")?;
    if !tuple.writes.is_empty() {
        out.line("")?;
        let mut table = Columns::new(&["TASK RUN FROM IT", "NODE", "INDEX>", "WRITES", "BYTES>", "APPLIED"]);
        for row in &tuple.writes {
            let writes: Vec<&ChannelName> = row.writes.iter().map(|write| &write.channel).collect();
            let size: usize = row.writes.iter().map(|write| write.value.encoded_len()).sum();
            table.row([
                row.task.to_string(),
                row.node.to_string(),
                row.index.to_string(),
                list_or_dash(&writes),
                bytes(size as u64),
                if is_pending(row) { "no, pending" } else { "yes" }.to_owned(),
            ]);
        }
        out.table(&table)?;
    }
    Ok(())
}

fn stored(stored: &Stored) -> &'static str {
    match stored {
        Stored::Value(_) => "value",
        Stored::Snapshot(_) => "snapshot",
        Stored::Sentinel => "sentinel",
        Stored::Held => "held",
    }
}

fn elements(value: &ChannelValue) -> Option<usize> {
    value.as_list().map(threadkeep::value::ListValue::len)
}
