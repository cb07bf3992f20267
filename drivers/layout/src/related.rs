//! Lists of a thread that is written as a whole: copied, imported or converted.

use std::collections::HashMap;

use threadkeep::checkpoint::Stored;
use threadkeep::id::{ChannelName, Namespace, Version};
use threadkeep::value::{ChannelValue, ListValue};

/// The latest list of each channel. Gives a list that extends it a base, so that a saver looks up only the new elements.
/// Without it, writing a thread oldest checkpoint first would look up every element of every list: quadratic in its length.
#[derive(Debug, Default)]
pub struct Related(HashMap<(Namespace, ChannelName), (Version, ListValue)>);

impl Related {
    /// Returns `stored`, the entry of `channel` at `version`. If the channel's previous list is a prefix of its list, that list
    /// has the previous version as [`ListValue::base`], else none. The base that a list came with is not used: a caller may
    /// put two lists under one version, and a saver would take one for the other.
    pub fn stored(
        &mut self,
        namespace: &Namespace,
        channel: &ChannelName,
        version: Version,
        stored: &Stored,
    ) -> Stored {
        let mut related = |list| self.list((namespace.clone(), channel.clone()), version, list).into();
        match stored {
            Stored::Value(ChannelValue::List(list)) => Stored::Value(related(list)),
            Stored::Snapshot(ChannelValue::List(list)) => Stored::Snapshot(related(list)),
            other => other.clone(),
        }
    }

    fn list(&mut self, place: (Namespace, ChannelName), version: Version, list: &ListValue) -> ListValue {
        let list = match self.0.remove(&place) {
            Some((previous, mut grown)) if list.starts_with(&grown) => {
                grown.rebase(previous);
                list.iter_from(grown.len()).for_each(|element| grown.push(element.clone()));
                grown
            }
            _ => {
                let mut list = list.clone();
                list.detach();
                list
            }
        };
        self.0.insert(place, (version, list.clone()));
        list
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use threadkeep::value::{Element, Part};

    use super::*;

    fn version(counter: u64) -> Version {
        Version { counter, random: 0 }
    }

    fn list(numbers: impl IntoIterator<Item = usize>) -> ListValue {
        numbers.into_iter().map(|n| Element::from_json(&json!(n)).unwrap()).collect()
    }

    #[test]
    fn a_list_that_goes_on_is_related_to_the_last_one_of_its_channel() {
        let mut related = Related::default();
        let mut put = |channel: &str, counter, numbers: Vec<usize>| {
            let mut given = list(numbers);
            given.rebase(version(counter));
            let stored = Stored::Snapshot(given.clone().into());
            let Stored::Snapshot(ChannelValue::List(list)) =
                related.stored(&"".into(), &channel.into(), version(counter), &stored)
            else {
                panic!("a snapshot stays one")
            };
            assert_eq!(list, given);
            list
        };
        assert_eq!(put("a", 1, vec![0, 1, 2]).base(), None);
        let longer = put("a", 2, vec![0, 1, 2, 3]);
        assert_eq!(longer.base(), Some(version(1)));
        assert_eq!(longer.parts(), [Part::Base { start: 0, len: 3 }, Part::New { len: 1 }]);
        assert_eq!(put("b", 3, vec![0, 1, 2, 3, 4]).base(), None, "another channel");
        assert_eq!(put("a", 4, vec![0, 1, 2, 3]).base(), Some(version(2)), "the same list");
        assert_eq!(put("a", 5, vec![0, 9]).base(), None, "another list");
        assert_eq!(put("a", 6, vec![0, 9, 2]).base(), Some(version(5)));
        assert_eq!(put("a", 6, vec![0, 8, 2]).base(), None, "two lists under one version");
    }
}
