//! What reads show: each checkpoint, and those that a query selects.

use serde_json::{Map, Value as Json};
use threadkeep::checkpoint::CheckpointTuple;
use threadkeep::saver::{ListQuery, LocalKey};

use super::shelf::Document;
use super::{Lapse, Loner, PAGE};

impl Loner {
    /// A checkpoint as a read shows it.
    pub(super) fn shown(&self, mut tuple: CheckpointTuple) -> CheckpointTuple {
        let extra: Map<String, Json> = (*tuple.metadata.extra).clone();
        let stored = |(key, value): (String, Json)| match self.0.lapse {
            Lapse::LosesDots => (key.replace('.', "_"), value),
            Lapse::LosesFractions => (key, integral(value)),
            _ => (key, value),
        };
        tuple.metadata.extra = extra.into_iter().map(stored).collect::<Map<_, _>>().into();
        if self.is(Lapse::ShowsAPageOfRows) {
            tuple.writes.truncate(PAGE);
        }
        tuple
    }

    /// Whether a checkpoint has the metadata of a filter.
    fn matches(&self, tuple: &CheckpointTuple, filter: &Map<String, Json>) -> bool {
        let metadata = tuple.metadata.to_json();
        let same = |(key, wanted): (&String, &Json)| match (self.0.lapse, metadata.get(key), wanted) {
            (Lapse::FoldsMetadata, Some(Json::String(found)), Json::String(wanted)) => {
                found.eq_ignore_ascii_case(wanted)
            }
            (Lapse::ComparesAsFloats, Some(Json::Number(found)), Json::Number(wanted)) => {
                found.as_f64().map(f64::to_bits) == wanted.as_f64().map(f64::to_bits)
            }
            (Lapse::FollowsDots, None, wanted) => {
                let mut at = Some(&Json::Null);
                for (n, part) in key.split('.').enumerate() {
                    at = if n == 0 { metadata.get(part) } else { at.and_then(|found| found.get(part)) };
                }
                at == Some(wanted)
            }
            (_, found, wanted) => found == Some(wanted),
        };
        filter.iter().all(same)
    }

    pub(super) fn listed(&self, document: &Document, query: &ListQuery) -> Vec<CheckpointTuple> {
        let namespace = query.namespace.as_ref().map(|namespace| self.namespace(namespace));
        let places = |place: &&LocalKey| namespace.as_ref().is_none_or(|only| *only == place.0);
        let mut places: Vec<_> = document.order.iter().filter(places).collect();
        if self.is(Lapse::ListsByInsertion) {
            places.reverse();
        } else {
            places.sort_by_key(|place| std::cmp::Reverse(place.1));
        }
        let before = |place: &&LocalKey| query.before.is_none_or(|before| place.1 < before);
        let limit = query.limit.unwrap_or(usize::MAX);
        let limit = if self.is(Lapse::ListsAPage) { limit.min(PAGE) } else { limit };
        if self.is(Lapse::LimitsBeforeBefore) && query.filter.is_empty() {
            places.truncate(limit);
        }
        if self.is(Lapse::FiltersAPage) && !query.filter.is_empty() {
            places.truncate(PAGE);
        }
        let tuples = places.into_iter().filter(before).filter_map(|place| document.checkpoints.get(place));
        let found = tuples.filter(|tuple| self.matches(tuple, &query.filter)).take(limit);
        let mut joined = 0;
        let found = found.take_while(|tuple| {
            let fits = joined < limit || !self.is(Lapse::LimitsJoinedRows);
            joined += tuple.writes.len().max(1);
            fits
        });
        found.map(|tuple| query.load.of(self.shown((**tuple).clone()))).collect()
    }
}

/// A value whose whole numbers are integers.
fn integral(value: Json) -> Json {
    match value {
        #[allow(clippy::cast_possible_truncation, reason = "that is the lapse")]
        Json::Number(number) if number.is_f64() => match number.as_f64() {
            Some(float) if float.fract() == 0.0 => Json::from(float as i64),
            _ => Json::Number(number),
        },
        Json::Array(list) => list.into_iter().map(integral).collect(),
        Json::Object(map) => map.into_iter().map(|(key, value)| (key, integral(value))).collect(),
        other => other,
    }
}
