//! One self-contained HTML page.

use std::fmt::Write as _;

use super::plot::Plot;

const STYLE: &str = "body{font:15px/1.5 sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222}
pre{overflow-x:auto;background:#f6f6f6;padding:1rem;font-size:12px}svg{max-width:100%;height:auto}h2{margin-top:2.5rem}";

pub(super) fn page(tables: &str, plots: &[Plot]) -> String {
    let mut pictures = String::new();
    for Plot { title, svg, .. } in plots {
        // Writing into a String cannot fail.
        let _ = write!(pictures, "<h2>{}</h2>\n{svg}\n", escaped(title));
    }
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Threadkeep workloads</title>\n\
         <style>{STYLE}</style></head><body>\n<h1>Threadkeep workloads</h1>\n{pictures}<h2>Tables</h2>\n\
         <pre>{}</pre>\n</body></html>\n",
        escaped(tables)
    )
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
