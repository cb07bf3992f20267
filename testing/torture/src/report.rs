//! What a run tried and found, as one table.

use std::time::Duration;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use crate::exercise::{Exercise, Tally};

/// The result of one exercise.
pub struct Row {
    /// The exercise.
    pub exercise: Exercise,
    /// The number of turns.
    pub turns: u64,
    /// The total time of the turns.
    pub took: Duration,
    /// Its counts.
    pub tally: Tally,
    /// Its findings, each with the seed of the turn.
    pub found: Vec<(u64, String)>,
    /// Why it could not be tried, if so.
    pub not_tried: Option<String>,
}

impl Row {
    /// A row before the first turn.
    pub fn new(exercise: Exercise) -> Self {
        let (tally, found) = (Tally::default(), Vec::new());
        Self { exercise, turns: 0, took: Duration::ZERO, tally, found, not_tried: None }
    }

    /// After the last turn: that an exercise has tried nothing is a finding, of the seed of its first turn. If it could not
    /// be tried, the table says so.
    pub fn finish(&mut self, seed: u64) {
        if self.not_tried.is_some() {
            return;
        }
        let untried = self.exercise.untried(&self.tally);
        if self.found.is_empty() && !untried.is_empty() {
            self.found.push((seed, format!("it has tried nothing: no {}", untried.join(", no "))));
        }
    }

    fn cells(&self) -> [String; 6] {
        let counts = self.tally.counts();
        let counts = counts.iter().map(|(what, n)| format!("{} {what}", grouped(*n)));
        let found = match (&self.not_tried, self.found.len()) {
            (Some(why), 0) => format!("not tried: {}", why.lines().next().unwrap_or_default()),
            (None, 0) => "nothing".to_owned(),
            (_, found) => found.to_string(),
        };
        [
            self.exercise.title(),
            self.exercise.about.what.to_owned(),
            grouped(self.turns),
            format!("{} s", grouped(self.took.as_secs())),
            counts.collect::<Vec<_>>().join(", "),
            found,
        ]
    }
}

/// The table, for a terminal or as Markdown.
pub fn table(rows: &[Row], markdown: bool) -> String {
    let mut table = Table::new();
    table.load_preset(if markdown { presets::ASCII_MARKDOWN } else { presets::UTF8_BORDERS_ONLY });
    if !markdown {
        table.set_content_arrangement(ContentArrangement::Dynamic);
    }
    table.set_header(["Exercise", "What is tried", "Turns", "Time", "How often", "Found"]);
    for row in rows {
        table.add_row(row.cells());
    }
    for column in [2, 3] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.to_string()
}

/// A number with its digits in groups of three.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exercises::ALL;

    #[test]
    fn an_exercise_that_has_tried_nothing_is_a_finding() {
        for exercise in ALL {
            let needs = exercise.about.needs;
            assert!(!needs.is_empty(), "{}", exercise.title());
            for missing in needs {
                let mut row = Row::new(*exercise);
                for what in needs {
                    // A count of zero is none.
                    row.tally.add(what, usize::from(what != missing));
                }
                row.finish(7);
                assert_eq!(row.found, [(7, format!("it has tried nothing: no {missing}"))]);
                row.found.clear();
                row.tally.add(missing, 1);
                row.finish(7);
                assert!(row.found.is_empty(), "{:?}", row.found);
            }
        }
    }

    #[test]
    fn the_table_says_what_was_tried_how_often_and_what_was_found() {
        let mut row = Row::new(ALL[0]);
        row.tally.add("images", 1_234_567);
        row.turns = 12;
        let lost = Row { found: vec![(1, "lost".into())], ..Row::new(ALL[1]) };
        let missing = Row { not_tried: Some("etcd is missing".into()), ..Row::new(ALL[2]) };
        let shown = table(&[row, lost, missing], true);
        assert!(shown.contains("1,234,567 images"), "{shown}");
        assert!(shown.contains("| nothing ") && shown.contains("| 1 "), "{shown}");
        assert!(shown.contains("| not tried: etcd is missing |"), "{shown}");
        let found = vec![(1, "lost".into())];
        let both = Row { found, not_tried: Some("gone".into()), ..Row::new(ALL[2]) };
        assert!(!table(&[both], true).contains("not tried"), "a finding comes first");
        assert_eq!(grouped(0) + &grouped(999) + &grouped(1000), "09991,000");
    }
}
