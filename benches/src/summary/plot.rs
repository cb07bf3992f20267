//! Plots as SVG.

use std::collections::BTreeMap;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

use super::{Group, groups, name};
use crate::row::Row;

const SIZE: (u32, u32) = (960, 480);
const TEXT: (&str, u32) = ("sans-serif", 14);
const COLOURS: [RGBColor; 10] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(255, 127, 14),
    RGBColor(148, 103, 189),
    RGBColor(140, 86, 75),
    RGBColor(227, 119, 194),
    RGBColor(23, 190, 207),
    RGBColor(188, 189, 34),
    RGBColor(127, 127, 127),
];

/// A plot.
pub(super) struct Plot {
    /// The name of its file.
    pub(super) name: String,
    /// What it shows.
    pub(super) title: String,
    /// The picture.
    pub(super) svg: String,
}

/// Lines with names.
type Lines = Vec<(String, Vec<(f64, f64)>)>;

/// What the axes show.
struct Axes {
    x: &'static str,
    y: &'static str,
    log_x: bool,
}

pub(super) fn plots(rows: &[Row]) -> Result<Vec<Plot>> {
    let mut plots = Vec::new();
    for (group, rows) in groups(rows) {
        let turns = |y| Axes { x: "turn", y, log_x: false };
        let kinds: [(&str, &str, Axes, Lines); 4] = [
            ("cost", "Cost per turn over turns", turns("milliseconds"), curves(&rows, |point| point.ms)),
            (
                "cpu",
                "CPU per turn over turns",
                turns("milliseconds of CPU"),
                curves(&rows, |point| point.cpu_ms),
            ),
            #[allow(clippy::cast_precision_loss, reason = "drawn with a few hundred points")]
            (
                "bytes",
                "Bytes over turns",
                turns("megabytes"),
                curves(&rows, |point| point.bytes as f64 / 1e6),
            ),
            (
                "latency",
                "Latency of turns",
                Axes { x: "percentile", y: "milliseconds", log_x: false },
                percentiles(&rows),
            ),
        ];
        let throughput = (
            "throughput",
            "Throughput over writers",
            Axes { x: "writers", y: "turns a second", log_x: true },
            throughput(&rows),
        );
        for (kind, what, axes, lines) in kinds.into_iter().chain([throughput]) {
            if lines.iter().any(|(_, points)| points.len() > 1) {
                plots.push(plot(kind, what, group, &axes, &lines)?);
            }
        }
    }
    Ok(plots)
}

fn curves(rows: &[&Row], y: impl Fn(&crate::row::Point) -> f64) -> Lines {
    #[allow(clippy::cast_precision_loss, reason = "a count of turns")]
    let line = |row: &Row| {
        let points = row.found.curve.iter().map(|point| (point.turn as f64, y(point)));
        // A zero, as for bytes in memory, has no place on a logarithmic axis.
        points.filter(|(_, y)| *y > 0.0).collect()
    };
    let first = rows.iter().filter(|row| row.case.rep == 0);
    first.map(|row| (name(row), line(row))).filter(|(_, line): &(_, Vec<_>)| !line.is_empty()).collect()
}

fn percentiles(rows: &[&Row]) -> Lines {
    let first = rows.iter().filter(|row| row.case.rep == 0 && row.found.percentiles.len() > 1);
    first
        .map(|row| {
            let writers =
                if row.case.threads > 1 { format!(", {} writers", row.case.writers) } else { String::new() };
            (name(row) + &writers, row.found.percentiles.clone())
        })
        .collect()
}

fn throughput(rows: &[&Row]) -> Lines {
    let mut lines: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.case.rep == 0) {
        if let Some(rate) = row.found.turns_per_s {
            #[allow(clippy::cast_precision_loss, reason = "a few writers")]
            lines.entry(name(row)).or_default().push((row.case.writers as f64, rate));
        }
    }
    for line in lines.values_mut() {
        line.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    lines.into_iter().collect()
}

fn plot(kind: &str, what: &str, group: Group, axes: &Axes, lines: &Lines) -> Result<Plot> {
    let title = format!("{what}: {}", group.title());
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(drawing)?;
        let (x, y) = bounds(lines);
        let y = (y.0..y.1).log_scale();
        if axes.log_x {
            draw(&area, (x.0..x.1).log_scale(), y, axes, lines)?;
        } else {
            draw(&area, x.0..x.1, y, axes, lines)?;
        }
        area.present().map_err(drawing)?;
    }
    Ok(Plot { name: format!("{}-{kind}", group.slug()), title, svg })
}

fn draw<X, Y>(area: &DrawingArea<SVGBackend<'_>, Shift>, x: X, y: Y, axes: &Axes, lines: &Lines) -> Result<()>
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64> + 'static,
    Y: AsRangedCoord<Value = f64>,
    Y::CoordDescType: ValueFormatter<f64> + 'static,
{
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(70)
        .build_cartesian_2d(x, y)
        .map_err(drawing)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc(axes.x)
        .y_desc(axes.y)
        .label_style(TEXT)
        .axis_desc_style(TEXT)
        .x_label_formatter(&|value| short(*value))
        .y_label_formatter(&|value| short(*value))
        .draw()
        .map_err(drawing)?;
    for (number, (name, points)) in lines.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))
            .map_err(drawing)?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .label_font(TEXT)
        .background_style(WHITE.mix(0.8))
        .border_style(RGBColor(200, 200, 200))
        .draw()
        .map_err(drawing)
}

/// The bounds of all points, with some headroom.
fn bounds(lines: &Lines) -> ((f64, f64), (f64, f64)) {
    let points = || lines.iter().flat_map(|(_, points)| points);
    let range = |of: fn(&(f64, f64)) -> f64| {
        points().map(of).fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)))
    };
    let (x, y) = (range(|point| point.0), range(|point| point.1));
    (x, (y.0 * 0.7, y.1 * 1.6))
}

fn short(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        1.0.. => format!("{value:.1}").trim_end_matches(".0").to_owned(),
        _ => format!("{value:.3}"),
    }
}

fn drawing(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("cannot draw a plot: {error}")
}
