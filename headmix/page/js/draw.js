/* Figures, one function a shape: grid, depth, curves. Each returns its metrics, what plotly draws, and
   the same numbers as a table to read and as plain rows to save. */

/* Points { at, value, mean, … } as plain columns and rows, one row a point, named as in the results
   file: axes first, then the number, then what is known of its null and interval. */
function longForm(metric, points) {
  const found = points.filter((p) => !Number.isNaN(p.value));
  const dims = metric.value.dims.filter((dim) => found.some((p) => dim in p.at));
  const parts = [[metric.variable, "value"], ["null_mean", "mean"], ["null_sd", "sd"], ["low", "low"], ["high", "high"], ["z", "z"]]
    .filter(([, part]) => part === "value" || found.some((p) => Number.isFinite(p[part])));
  const label = (dim, i) => (/^\d+$/.test(DATA.labels[dim][i]) ? Number(DATA.labels[dim][i]) : DATA.labels[dim][i]);
  const plainNumber = (x) => (Number.isFinite(x) ? x : null);
  return {
    columns: [...dims, ...parts.map(([name]) => name)],
    rows: found.map((p) => [...dims.map((dim) => label(dim, p.at[dim])), ...parts.map(([, part]) => plainNumber(p[part]))]),
  };
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function theme() {
  return document.documentElement.dataset.theme;
}

/* A part of one of the page's colour scales, both ends between 0 and 1. */
function scaleOf(kind, from = 0, to = 1) {
  const colours = DATA.scales[theme()][kind].map((c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));
  const at = (t) => {
    const place = Math.min(Math.max(t, 0), 1) * (colours.length - 1);
    const i = Math.min(Math.floor(place), colours.length - 2);
    return `rgb(${colours[i].map((c, k) => Math.round(c + (colours[i + 1][k] - c) * (place - i))).join()})`;
  };
  return range(25).map((i) => [i / 24, at(from + ((to - from) * i) / 24)]);
}

/* plotly takes a subset of HTML for markup, and dollars for mathematics; this is for text that must
   stay text. What XML cannot hold would spoil a saved picture. */
function plain(text) {
  const sound = String(text).toWellFormed().replace(/[\0-\x08\v\f\x0e-\x1f\ufffe\uffff]/g, "\ufffd");
  return sound.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\$/g, "&#36;");
}

function quantity(metric) {
  return metric.unit ? `${metric.title} [${metric.unit}]` : metric.title;
}

function axis(title, labels, more = {}) {
  const ticks = labels ? { tickmode: "array", ...everySo(labels, Math.ceil(labels.length / 24)) } : {};
  return {
    title: { text: plain(title), standoff: 8, font: { size: 12 } }, gridcolor: colour("line"), linecolor: colour("line"), tickcolor: colour("line"),
    ticks: "outside", ticklen: 4, zeroline: false, automargin: true, fixedrange: true, ...ticks, ...more,
  };
}

function everySo(labels, every) {
  const kept = range(labels.length).filter((i) => i % every === 0);
  return { tickvals: kept, ticktext: kept.map((i) => plain(labels[i])), labels };
}

/* Leave out labels along x that a figure of this width has no room for. Short ones lie flat, longer
   ones may stand. */
function fit(figure, width) {
  const { xaxis, margin } = figure.layout;
  if (!xaxis?.labels || !width) return figure;
  const bar = figure.traces.some((trace) => trace.colorbar) ? 90 : 0;
  const room = Math.max(40, width - margin.l - margin.r - bar) / xaxis.labels.length;
  const longest = Math.max(...xaxis.labels.map((label) => String(label).length));
  Object.assign(xaxis, everySo(xaxis.labels, Math.ceil((longest > 4 ? 16 : 7 * longest + 6) / room)));
  return figure;
}

function layout(height, more) {
  return {
    height, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: false, hovermode: "closest",
    margin: { l: 56, r: 12, t: 12, b: 44 },
    font: { family: colour("sans"), size: 12, color: colour("muted") },
    hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("ink"), family: colour("sans"), size: 12 }, align: "left" },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } },
    showlegend: false, ...more,
  };
}

function hover(where, metric, found) {
  return [`<b>${plain(where)}</b>`, ...hoverLines(metric, found)].join("<br>");
}

function hoverLines(metric, found) {
  const lines = [`${plain(quantity(metric))}  ${number(found.value)}`];
  if (!Number.isNaN(found.mean)) lines.push(`null  ${nullText(found)}`);
  if (intervalText(found)) lines.push(`95 %  ${intervalText(found)}`);
  if (!Number.isNaN(found.z)) lines.push(`z<sub>null</sub>  ${number(found.z, 3)}`);
  return lines;
}

/* Colours for numbers, centred on the null: equal distances are equally strong on both sides, and
   only the part of the scale in use is shown. Where the null differs from cell to cell, the cell's
   own null is taken off first, and a cell without one stays blank. Few outliers do not flatten the
   rest: the scale then ends before them, and says so. */
function colouring(cells, show) {
  const finite = cells.filter((c) => Number.isFinite(c[show]));
  const bar = { thickness: 10, outlinewidth: 0, ticks: "outside", ticklen: 4, tickcolor: colour("line"), tickfont: { size: 11 }, xpad: 6 };
  const nulls = show === "z" ? [0] : finite.map((c) => c.mean).filter(Number.isFinite);
  if (!finite.length || !nulls.length) return { numberOf: (c) => c[show], colorscale: scaleOf("sequential"), colorbar: bar, says: NO_NULL };
  const varies = Math.max(...nulls) - Math.min(...nulls) > 1e-3 * Math.max(...nulls.map(Math.abs));
  const numberOf = (c) => c[show] - (varies ? c.mean : 0);
  const middle = varies ? 0 : nulls[0];
  const values = finite.map(numberOf).filter(Number.isFinite);
  const distances = values.map((v) => Math.abs(v - middle)).sort((a, b) => a - b);
  const most = distances.at(-1);
  const usual = distances[Math.floor(0.97 * (distances.length - 1))];
  const span = (most > 2.5 * usual ? usual : most) || 1e-12;
  const low = Math.max(Math.min(...values, middle), middle - span);
  const high = Math.min(Math.max(...values, middle), middle + span);
  const ends = [[low, "≤ "], [high, "≥ "]].filter(([end]) => Math.abs(end - middle) > 0.12 * (high - low));
  bar.tickvals = [middle, ...ends.map(([end]) => end)];
  bar.ticktext = [
    varies && show !== "z" ? "at the null" : `null ${number(middle, 3)}`,
    ...ends.map(([end, sign]) => (most > span && Math.abs(end - middle) >= span ? sign : "") + (varies && show !== "z" && end > 0 ? "+" : "") + number(end, 3)),
  ];
  const part = (v) => 0.5 + (v - middle) / (2 * span);
  return { numberOf, colorscale: scaleOf("diverging", part(low), part(high)), zmin: low, zmax: high, colorbar: bar, says: varies ? OWN_NULL + (values.length < finite.length ? SOME_BLANK : "") : "" };
}

/* What the colours are, where they are not what the page says of them as a rule. */
const NO_NULL = " There is no null to compare with: the stronger the colour, the larger.";
const OWN_NULL = " The null differs from cell to cell: the colours show value − null.";
const SOME_BLANK = " Cells without a null are blank; their values are in the table.";

/* Rows × columns of cells { value, mean, sd, z, where }. `ringed` are { row, column, second }: the
   chosen head, and dotted the second of a chosen pair. */
function grid({ metric, cells, show = "value", rows, columns, rowTitle, columnTitle, ringed = [], upwards }) {
  const colours = colouring(cells.flat(), show);
  const height = Math.min(30, Math.max(14, 520 / rows.length)) * rows.length + 70;
  const { numberOf, says, ...look } = colours;
  const drawn = (x) => (Number.isFinite(x) ? x : null);
  const trace = {
    type: "heatmap", z: cells.map((row) => row.map((c) => drawn(numberOf(c)))),
    text: cells.map((row) => row.map((c) => hover(c.where, metric, c))), hovertemplate: "%{text}<extra></extra>",
    hoverongaps: false, xgap: 1.5, ygap: 1.5, ...look,
  };
  return {
    metrics: [metric],
    says,
    traces: [trace],
    layout: layout(height, {
      xaxis: axis(columnTitle, columns, { showgrid: false, range: [-0.54, columns.length - 0.46], showline: false }),
      yaxis: axis(rowTitle, rows, { showgrid: false, showline: false, range: upwards ? [-0.56, rows.length - 0.44] : [rows.length - 0.44, -0.56] }),
      shapes: ringed.map(({ row, column, second }) => frame(row, row, column, column, second)),
    }),
    table: () => table([`${rowTitle} \\ ${columnTitle}`, ...columns], cells.map((row, i) => [rows[i], ...row.map((c) => c[show])])),
    rows: () => longForm(metric, cells.flat()),
  };
}

/* A frame around cells of a grid. */
function frame(top, bottom, left, right, dotted) {
  return {
    type: "rect", x0: left - 0.5, x1: right + 0.5, y0: top - 0.5, y1: bottom + 0.5,
    line: { color: colour("ink"), width: 2, dash: dotted ? "dot" : "solid" },
  };
}

/* Rings around the points { x, y, value, second } of the chosen head and of the other of a pair. */
function rings(points, found = points) {
  return points.map(({ x, y, second }, i) => ({
    type: "scatter", mode: "markers", name: second ? "other head of the pair" : "chosen head", showlegend: true, x: [x], y: [y], hoverinfo: "skip",
    marker: { size: 13, symbol: second ? "diamond-open" : "circle-open", color: colour("warm"), line: { width: 2.5 } }, ...whiskers([found[i]], "warm"),
  }));
}

/* The interval as whiskers. */
function whiskers(found, name) {
  if (!found.some((f) => intervalText(f))) return {};
  return { error_y: { type: "data", symmetric: false, array: found.map((f) => f.high - f.value), arrayminus: found.map((f) => f.value - f.low), color: colour(name), thickness: 1.5, width: 3 } };
}

function nullBand(x, nulls) {
  if (nulls.every((c) => Number.isNaN(c.mean))) return [];
  const traces = [];
  if (nulls.every((c) => !Number.isNaN(c.sd))) {
    const edge = { x, type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
    traces.push({ ...edge, y: nulls.map((c) => c.mean - 2 * c.sd) });
    traces.push({ ...edge, y: nulls.map((c) => c.mean + 2 * c.sd), fill: "tonexty", fillcolor: colour("band"), name: "null ± 2 sd", showlegend: true });
  }
  traces.push({ x, y: nulls.map((c) => c.mean), type: "scatter", mode: "lines", name: "null", line: { dash: "dash", width: 1.5, color: colour("muted") }, hoverinfo: "skip", showlegend: true });
  return traces;
}

/* One position a layer: a line of means, dots of heads, the null. */
function depthFigure({ metric, layers, means, dots, nulls, ringed = [] }) {
  const x = range(layers.length);
  const traces = nullBand(x, nulls);
  if (dots.length) {
    traces.push({
      type: "scatter", mode: "markers", name: "one head", showlegend: true, x: dots.map((d) => d.x), y: dots.map((d) => d.value),
      text: dots.map((d) => hover(d.where, metric, d)), hovertemplate: "%{text}<extra></extra>", customdata: dots,
      marker: { size: 7, color: colour("accent"), opacity: 0.45, line: { width: 0 } },
    });
  }
  traces.push({
    type: "scatter", mode: "lines+markers", name: dots.length ? "mean over heads" : "layer", showlegend: true, x, y: means.map((m) => m.value),
    text: means.map((m, i) => hover(layers[i], metric, m)), hovertemplate: "%{text}<extra></extra>",
    line: { color: colour("accent"), width: 2 }, marker: { size: dots.length ? 1 : 7 }, ...whiskers(means, "accent"),
  });
  traces.push(...rings(ringed.map((d) => ({ ...d, y: d.value }))));
  return {
    metrics: [metric],
    traces,
    layout: layout(330, {
      showlegend: true, margin: { l: 56, r: 12, t: 30, b: 44 },
      xaxis: axis("layer", layers, { range: [-0.5, layers.length - 0.5], showgrid: false }), yaxis: axis(quantity(metric)),
    }),
    table: () => table(["layer", metric.title, "95 %", "null ± sd", zNull()], means.map((m, i) => [layers[i], m.value, intervalText(m) || "–", nullText(nulls[i]), dots.length ? "–" : number(m.z, 3)])),
    rows: () => longForm(metric, dots.length ? dots : means),
  };
}

/* Curves { name, values, points, strong, second } over an axis of singular values or the like. */
function curvesFigure({ metric, curves, along, nulls, log }) {
  const x = range(nulls.length).map((i) => i + 1);
  const several = curves.length > 1;
  const traces = nullBand(x, nulls);
  for (const curve of [...curves].sort((a, b) => a.strong - b.strong || Boolean(b.second) - Boolean(a.second))) {
    traces.push({
      type: "scatter", mode: "lines", name: plain(curve.name), showlegend: curve.strong, x, y: curve.values,
      line: { color: curve.strong && several ? colour("warm") : colour("accent"), width: curve.strong ? 2.5 : 1, dash: curve.second ? "dot" : "solid" }, opacity: curve.strong ? 1 : 0.45,
      text: x.map((k) => `${plain(curve.name)} · ${plain(along)} ${k}`), hovertemplate: "%{text}<br>%{y:.4g}<extra></extra>",
    });
  }
  return {
    metrics: [metric],
    traces,
    layout: layout(340, {
      showlegend: true, margin: { l: 56, r: 12, t: 30, b: 44 },
      xaxis: axis(`${along} index`), yaxis: axis(quantity(metric), null, log ? { type: "log", dtick: 1 } : { rangemode: "tozero" }),
    }),
    table: () => table([along, ...curves.map((c) => c.name), "null"], x.map((k, i) => [String(k), ...curves.map((c) => c.values[i]), nullText(nulls[i])])),
    rows: () => longForm(metric, curves.flatMap((c) => c.points)),
  };
}
