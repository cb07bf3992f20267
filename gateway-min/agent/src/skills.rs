//! Skills: named instructions in files, of which an agent sees an index and reads those that it needs.

use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use serde_json::{Value as Json, json};

use crate::tools::{Tool, ToolContext, ToolError, ToolOutput, ToolSpec};

/// The name of the tool that reads a skill.
pub const READ_SKILL: &str = "read_skill";
/// The most skills of a directory, by name.
const SKILLS_MAX: usize = 200;
/// The largest file, in bytes; a larger one is no skill.
const FILE_MAX: u64 = 64 * 1024;
/// The longest description, in characters.
const DESCRIPTION_MAX: usize = 300;

/// A skill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skill {
    /// Its name: that of its file or directory.
    pub name: String,
    /// What it is for.
    pub description: String,
    /// The whole text.
    pub text: String,
}

/// The skills in a directory, in the order of their names: the files `<name>.md` and `<name>/SKILL.md`, the latter if
/// there are both. A directory that does not exist has none. Blocks.
///
/// The description is `description:` at the file's beginning, between two lines `---`, or else its first line of text.
pub fn read_all(directory: &Path) -> Vec<Skill> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(directory = %directory.display(), %error, "the skills cannot be read");
            }
            return Vec::new();
        }
    };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    // Of a file and a directory with one name the directory comes first.
    paths.sort();
    let mut found = Vec::new();
    for path in paths {
        // A directory's name has no extension, and is no name of a skill if it has a dot: `review.old`.
        let (file, name) = if path.is_dir() {
            (path.join("SKILL.md"), path.file_name())
        } else {
            (path.clone(), path.file_stem())
        };
        let is_skill = file.extension().is_some_and(|extension| extension == "md");
        let Some(name) = name.and_then(|name| name.to_str()).filter(|name| is_skill && is_name(name)) else {
            continue;
        };
        match read(&file) {
            Ok(text) => found.push(Skill { name: name.to_owned(), description: description(&text), text }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(file = %file.display(), %error, "a skill cannot be read"),
        }
    }
    found.sort_by(|one, other| one.name.cmp(&other.name));
    found.dedup_by(|one, other| one.name == other.name);
    found.truncate(SKILLS_MAX);
    found
}

fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 64
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
}

fn read(file: &Path) -> io::Result<String> {
    let metadata = fs::metadata(file)?;
    if !metadata.is_file() || metadata.len() > FILE_MAX {
        return Err(io::Error::other(format!("it is no file of at most {FILE_MAX} bytes")));
    }
    let mut text = String::new();
    // It may be growing.
    fs::File::open(file)?.take(FILE_MAX).read_to_string(&mut text)?;
    Ok(text)
}

fn description(text: &str) -> String {
    // As editors of other systems write files.
    let text = text.trim_start_matches('\u{feff}').replace("\r\n", "\n");
    let (front, body) = match text.strip_prefix("---\n").and_then(|rest| rest.split_once("\n---")) {
        Some((front, body)) => (front, body),
        None => ("", text.as_str()),
    };
    let first = || body.lines().map(|line| line.trim_start_matches('#').trim()).find(|line| !line.is_empty());
    let line = stated(front).or_else(|| first().map(str::to_owned)).unwrap_or_default();
    line.chars().take(DESCRIPTION_MAX).collect()
}

/// The text of `description:`, with that of the indented lines after it, as one line; `None` if there is none.
fn stated(front: &str) -> Option<String> {
    let mut lines = front.lines().skip_while(|line| !line.starts_with("description:"));
    let value = lines.next()?.strip_prefix("description:")?.trim();
    // YAML's marks for a text in the lines below.
    let value = if matches!(value.trim_end_matches(['-', '+']), "|" | ">") { "" } else { value };
    let more = lines.take_while(|line| line.is_empty() || line.starts_with([' ', '\t'])).map(str::trim);
    let parts: Vec<&str> = std::iter::once(value).chain(more).filter(|part| !part.is_empty()).collect();
    let stated = parts.join(" ");
    let stated = stated.trim_matches(['"', '\'']);
    (!stated.is_empty()).then(|| stated.to_owned())
}

/// Those of `skills` that an agent has, in the order of `names`: `None` is all, an empty list none.
pub fn permitted(skills: Vec<Skill>, names: Option<&[String]>) -> Vec<Skill> {
    let Some(names) = names else { return skills };
    names.iter().filter_map(|name| skills.iter().find(|skill| skill.name == *name).cloned()).collect()
}

/// What the system prompt says about an agent's skills; `None` if it has none.
pub(crate) fn section(skills: &[Skill]) -> Option<String> {
    let lines: Vec<String> =
        skills.iter().map(|skill| format!("- {}: {}", skill.name, skill.description)).collect();
    (!lines.is_empty()).then(|| {
        format!(
            "There are instructions for some kinds of work. Read those that fit your task with `{READ_SKILL}` before you \
             begin:\n{}",
            lines.join("\n")
        )
    })
}

/// The tool that reads skills; `None` if there are none.
pub(crate) fn tool(skills: Vec<Skill>) -> Option<Arc<dyn Tool>> {
    (!skills.is_empty()).then(|| Arc::new(ReadSkill(skills)) as Arc<dyn Tool>)
}

struct ReadSkill(Vec<Skill>);

#[async_trait]
impl Tool for ReadSkill {
    fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: READ_SKILL.to_owned(),
            description: "Returns the instructions with this name.".to_owned(),
            parameters: json!({
                "type": "object",
                "properties": {"name": {"type": "string", "description": "The name of the instructions."}},
                "required": ["name"],
            }),
        }
    }

    fn output_max_chars(&self) -> usize {
        // No file has more.
        usize::try_from(FILE_MAX).unwrap_or(usize::MAX)
    }

    async fn call(&self, _: &ToolContext, args: Json) -> Result<ToolOutput, ToolError> {
        let name = args["name"].as_str().unwrap_or_default();
        let skill = self.0.iter().find(|skill| skill.name == name);
        skill.map(|skill| ToolOutput::text(&skill.text)).ok_or_else(|| {
            let names: Vec<&str> = self.0.iter().map(|skill| skill.name.as_str()).collect();
            ToolError::Arguments(format!(
                "there are no instructions `{name}`. Available: {}",
                names.join(", ")
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        fs::create_dir(path.join("review")).unwrap();
        fs::write(
            path.join("review/SKILL.md"),
            "---\nname: x\ndescription: \"Reviews code\"\n---\n# Review\nLook.\n",
        )
        .unwrap();
        fs::write(path.join("deploy.md"), "\n# Deploys a service\nRun it.\n").unwrap();
        // None of these is a skill.
        fs::create_dir(path.join("empty")).unwrap();
        fs::write(path.join("notes.txt"), "x").unwrap();
        fs::write(path.join("not a name.md"), "x").unwrap();
        fs::write(path.join("large.md"), "x".repeat(70_000)).unwrap();
        fs::write(path.join("binary.md"), [0xff, 0xfe]).unwrap();
        directory
    }

    #[test]
    fn the_index_has_the_files_that_are_skills() {
        let directory = directory();
        let found = read_all(directory.path());
        let index: Vec<(&str, &str)> =
            found.iter().map(|skill| (skill.name.as_str(), skill.description.as_str())).collect();
        assert_eq!(index, [("deploy", "Deploys a service"), ("review", "Reviews code")]);
        let section = section(&found).unwrap();
        assert!(
            section.ends_with("begin:\n- deploy: Deploys a service\n- review: Reviews code"),
            "{section}"
        );
    }

    #[test]
    fn a_description_is_read_as_other_systems_and_yaml_write_it() {
        for text in [
            "---\nname: x\ndescription: Reviews code\n---\n# Review\n",
            "---\r\nname: x\r\ndescription: 'Reviews code'\r\n---\r\n# Review\r\n",
            "\u{feff}---\ndescription: Reviews code\n---\n",
            "---\ndescription: >-\n  Reviews\n  code\nname: x\n---\n",
            "---\ndescription: |\n  Reviews\n\n  code\n---\n",
            "---\ndescription: Reviews\n  code\n---\n",
            "---\ndescription:\nname: x\n---\n# Reviews code\n",
            "# Reviews code\r\n",
        ] {
            assert_eq!(description(text), "Reviews code", "{text:?}");
        }
    }

    #[test]
    fn a_directory_beside_that_of_a_skill_does_not_take_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let stored = [("review.old", "Old"), ("review", "New"), ("review.md", "Other"), ("x.off", "x")];
        for (name, text) in stored {
            let path = directory.path().join(name);
            if name == "review.md" {
                fs::write(path, text).unwrap();
            } else {
                fs::create_dir(&path).unwrap();
                fs::write(path.join("SKILL.md"), text).unwrap();
            }
        }
        let found = read_all(directory.path());
        let found: Vec<(&str, &str)> =
            found.iter().map(|skill| (skill.name.as_str(), skill.text.as_str())).collect();
        assert_eq!(found, [("review", "New")]);
    }

    /// An absent directory has no skills.
    #[test]
    fn a_directory_that_is_not_there_has_none() {
        let found = read_all(Path::new("/no/such/directory"));
        assert!(found.is_empty() && section(&found).is_none() && tool(found).is_none());
    }

    /// Scenario 74: `skills: []` is none.
    #[tokio::test]
    async fn an_agent_reads_only_what_it_is_permitted() {
        let directory = directory();
        let of = |names: Option<&[String]>| permitted(read_all(directory.path()), names);
        assert_eq!(of(None).len(), 2);
        assert!(of(Some(&[])).is_empty());
        let one = of(Some(&["review".to_owned(), "unknown".to_owned()]));
        assert_eq!(one.len(), 1);
        let tool = tool(one).unwrap();
        let context = ToolContext::new("t", "r", "/nonexistent");
        let text = tool.call(&context, json!({"name": "review"})).await.unwrap().content;
        assert!(text.ends_with("# Review\nLook.\n"), "{text}");
        let error = tool.call(&context, json!({"name": "../deploy"})).await.unwrap_err().to_string();
        assert_eq!(error, "there are no instructions `../deploy`. Available: review");
    }
}
