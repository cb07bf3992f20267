//! The fields of a response that a client selects.

use serde::Serialize;
use serde_json::Value;

use super::error::ApiError;
use super::fields::Fields;

/// Which fields of each item to return.
#[derive(Debug, Clone, Default)]
pub(super) struct Select(Option<Vec<&'static str>>);

impl Select {
    /// Takes the field `select`: names of `fields`, in any form that a query has for a list.
    pub(super) fn from_fields(fields: &mut Fields<'_>, allowed: &[&'static str]) -> Self {
        Self(fields.field("select").nullable().listed().each_of(allowed))
    }

    /// Whether this field is returned.
    pub(super) fn wants(&self, field: &str) -> bool {
        self.0.as_ref().is_none_or(|selected| selected.contains(&field))
    }

    /// The selected fields of an item; all of them without a selection.
    ///
    /// # Errors
    /// 500 with `failed` if the item has no JSON form.
    pub(super) fn of(&self, item: impl Serialize, failed: &'static str) -> Result<Value, ApiError> {
        let mut item = serde_json::to_value(item).map_err(|error| ApiError::internal(failed, &error))?;
        if let (Some(selected), Value::Object(fields)) = (&self.0, &mut item) {
            fields.retain(|name, _| selected.contains(&name.as_str()));
        }
        Ok(item)
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
