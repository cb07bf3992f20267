//! The fields of a response that a client selects.

use std::collections::BTreeSet;

use serde::Serialize;
use serde_json::Value;
use threadkeep::id::ChannelName;
use threadkeep::saver::Load;
use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::error::ApiError;
use super::fields::Fields;

/// The fields of a state.
const STATE_FIELDS: [&str; 10] = [
    VALUES,
    "next",
    "metadata",
    "checkpoint",
    "checkpoint_id",
    "parent_checkpoint",
    "parent_checkpoint_id",
    "created_at",
    "tasks",
    "interrupts",
];
/// The field of a state whose keys can be selected one by one.
const VALUES: &str = "values";
/// A selection of one of them, as a regular expression; [`key_of_values`] reads it.
const VALUES_KEY: &str = r"^values\.[A-Za-z0-9_-]+$";

/// Which fields of each item to return.
#[derive(Debug, Clone, Default)]
pub(super) struct Select(Option<Selected>);

#[derive(Debug, Clone, Default)]
struct Selected {
    fields: BTreeSet<&'static str>,
    /// Keys of [`VALUES`]; they count only if that is not selected as a whole.
    keys: BTreeSet<String>,
}

impl Selected {
    fn has(&self, field: &str) -> bool {
        self.fields.contains(field) || (field == VALUES && !self.keys.is_empty())
    }
}

/// The key that `values.<key>` names.
fn key_of_values(text: &str) -> Option<&str> {
    let key = text.strip_prefix(VALUES)?.strip_prefix('.')?;
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    (!key.is_empty() && key.bytes().all(fits)).then_some(key)
}

impl Select {
    /// Takes the field `select`: names of `fields`, in any form that a query has for a list.
    pub(super) fn from_fields(fields: &mut Fields<'_>, allowed: &[&'static str]) -> Self {
        let chosen = fields.field("select").nullable().listed().each_of(allowed);
        Self(chosen.map(|chosen| Selected { fields: chosen.into_iter().collect(), keys: BTreeSet::new() }))
    }

    /// [`Self::from_fields`] for states, of whose values single keys can be selected, as `values.<key>`.
    pub(super) fn of_state(fields: &mut Fields<'_>) -> Self {
        let mut keys = BTreeSet::new();
        let chosen = fields.field("select").nullable().listed().each(|item| {
            if !item.is_text_of(|text| key_of_values(text).is_some()) {
                return item.one_of(&STATE_FIELDS);
            }
            let text = item.text()?;
            keys.extend(key_of_values(&text).map(str::to_owned));
            None
        });
        Self(chosen.map(|chosen| Selected { fields: chosen.into_iter().collect(), keys }))
    }

    /// Whether this field is returned.
    pub(super) fn wants(&self, field: &str) -> bool {
        self.0.as_ref().is_none_or(|selected| selected.has(field))
    }

    /// Which values to load of states with these channels. Other keys are not asked for: a body may have any number.
    pub(super) fn load<'c>(&self, channels: impl IntoIterator<Item = &'c ChannelName>) -> Load {
        let Some(selected) = self.0.as_ref().filter(|selected| !selected.fields.contains(VALUES)) else {
            return Load::All;
        };
        let named = channels.into_iter().filter(|name| selected.keys.contains(name.as_str()));
        let named: BTreeSet<ChannelName> = named.cloned().collect();
        if named.is_empty() { Load::None } else { Load::Only(named) }
    }

    /// The selected fields of an item; all of them without a selection.
    ///
    /// # Errors
    /// 500 with `failed` if the item has no JSON form.
    pub(super) fn of(&self, item: impl Serialize, failed: &'static str) -> Result<Value, ApiError> {
        let item = serde_json::to_value(item).map_err(|error| ApiError::internal(failed, &error))?;
        Ok(self.fields_of(item))
    }

    /// The selected fields of an item in its JSON form.
    pub(super) fn fields_of(&self, mut item: Value) -> Value {
        if let (Some(selected), Value::Object(fields)) = (&self.0, &mut item) {
            fields.retain(|name, _| selected.has(name));
            if !selected.fields.contains(VALUES)
                && let Some(Value::Object(values)) = fields.get_mut(VALUES)
            {
                values.retain(|key, _| selected.keys.contains(key));
            }
        }
        item
    }

    /// [`Self::of`] for each item.
    ///
    /// # Errors
    /// As there.
    pub(super) fn of_each<T: Serialize>(
        &self,
        items: impl IntoIterator<Item = T>,
        failed: &'static str,
    ) -> Result<Vec<Value>, ApiError> {
        items.into_iter().map(|item| self.of(item, failed)).collect()
    }
}

/// How the API describes one selection of [`Select::of_state`].
#[derive(Debug)]
#[allow(dead_code, reason = "described, never built")]
pub(super) struct StateField;

impl PartialSchema for StateField {
    fn schema() -> RefOr<Schema> {
        let text = || ObjectBuilder::new().schema_type(Type::String);
        let fields = text().enum_values(Some(STATE_FIELDS));
        let key = text().pattern(Some(VALUES_KEY));
        let description = Some("A field of a state, or a key of its values.");
        OneOfBuilder::new().item(fields).item(key).description(description).into()
    }
}

impl ToSchema for StateField {}
