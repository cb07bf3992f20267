//! Lists of a thread that is written as a whole: copied, imported or converted.

use std::collections::HashMap;

use threadkeep::id::{ChannelName, Namespace, Version};
use threadkeep::value::ListValue;

/// The latest list of each channel. Gives a list that extends it a base, so that a saver looks up only the new elements.
/// Without it, writing a thread oldest checkpoint first would look up every element of every list: quadratic in its length.
#[derive(Debug, Default)]
pub struct Related(HashMap<(Namespace, ChannelName), (Version, ListValue)>);

impl Related {
    /// Returns `list`, the value of `channel` at `version`. If the previous list of the channel is a prefix of it, the result
    /// has that one's version as [`ListValue::base`].
    pub fn list(
        &mut self,
        namespace: &Namespace,
        channel: &ChannelName,
        version: Version,
        list: &ListValue,
    ) -> ListValue {
        let place = (namespace.clone(), channel.clone());
        let list = match self.0.remove(&place) {
            Some((known_as, mut grown)) if list.starts_with(&grown) => {
                grown.rebase(known_as);
                list.iter_from(grown.len()).for_each(|element| grown.push(element.clone()));
                grown
            }
            _ => list.clone(),
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
            let given = list(numbers);
            let list = related.list(&"".into(), &channel.into(), version(counter), &given);
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
    }
}
