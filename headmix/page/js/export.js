/* Data out: the numbers of a figure as CSV and JSON, the figure as PNG and SVG. All is made here, in
   the page, and saved as a download. */

const KINDS = { csv: "text/csv;charset=utf-8", json: "application/json", png: "image/png", svg: "image/svg+xml" };

/* Tables that are no figures, by the id of their section. */
const LISTS = { card: headList, glance: summaryList, joined: joinedList };

document.addEventListener("click", ({ target }) => {
  const button = target.closest?.("button[data-save]");
  if (button) save(button.dataset.of, button.dataset.save);
});

async function save(id, kind) {
  const saved = id in LISTS ? LISTS[id]() : figureData(id);
  const content = { csv: csvOf, json: jsonOf, png: pictureOf, svg: pictureOf }[kind];
  download(`${fileName(saved)}.${kind}`, new Blob([await content(saved, kind)], { type: KINDS[kind] }));
}

function download(name, blob) {
  const address = URL.createObjectURL(blob);
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000); // once the browser has begun to read
}

/* What a panel shows now: which figure of what, with its numbers as plain rows. */
function figureData(id) {
  const panel = PANELS[id];
  const figure = panel.draw();
  const choices = panel.depends.filter((name) => state[name] !== null && typeof state[name] !== "object");
  const selection = selected(choices, panel);
  return { id, caption: panel.caption(), metrics: figure.metrics ?? [], of: figure.of, selection, ...figure.rows() };
}

/* Choices by name, and those of the whole page: a panel may have a run or a position of its own. */
function selected(names, panel = {}) {
  const run = DATA.compared ? { run: panel.run ?? state.run } : {};
  const own = Object.fromEntries(names.map((name) => [name, name === "layer" ? DATA.layers[state.layer] : state[name]]));
  return { position: panel.position?.() ?? state.position, ...run, ...own };
}

/* Everything known of the chosen head: its own numbers, every pair it is part of, and its words. */
function headList() {
  const { layer, head } = state;
  const metrics = metricsOf("map", "labelled", "matrix", "cross", "text").filter((metric) => unit(metric) && metric.value.dims.includes("layer"));
  const rows = metrics.flatMap((metric) => pointsOf(metric, layer, head).filter((p) => p.value !== "" && !Number.isNaN(p.value))
    .map((p) => [metric.variable, metric.title, whereOf(metric, p.at), ...["value", "mean", "sd", "low", "high", "z"].map((part) => (Number.isNaN(p[part]) ? null : p[part]))]));
  const name = placeName({ layer, head });
  return {
    id: "head", caption: `Everything known of ${name}.`, metrics: [], of: name, selection: selected(["layer", "head"]),
    columns: ["metric", "title", "where", "value", "null_mean", "null_sd", "low", "high", "z"], rows,
  };
}

function pointsOf(metric, layer, head) {
  if (metric.shape === "matrix" || metric.shape === "cross") return partners(metric, layer, head);
  const own = { layer, [unit(metric)]: unitOf(metric, layer, head) };
  const found = places(metric, metric.value.dims.filter((dim) => !(dim in own)), own);
  return found.map((at) => (metric.shape === "text" ? { ...NOTHING, at, value: entry(metric, "value", at) } : look(metric, at)));
}

function whereOf(metric, at) {
  if (unit(metric) + "_b" in at) return pairName(metric, at);
  const further = Object.keys(at).filter((dim) => dim !== "layer" && dim !== unit(metric));
  return [placeName(at), ...further.map((dim) => `${dim} ${DATA.labels[dim][at[dim]]}`)].join(", ");
}

function summaryList() {
  return { id: "summary", caption: "Every metric in one line.", metrics: [], selection: {}, ...DATA.summary };
}

/* headmix-MODEL-panel-metric-L2: from letters that every file system takes. */
function fileName({ id, metrics, of, columns, rows }) {
  const words = ["headmix", DATA.model, id, ...metrics.map((metric) => metric.variable), of ?? onlyLayer(columns, rows)];
  const safe = (word) => String(word).replace(/[^A-Za-z0-9._]+/g, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, 60);
  return words.map(safe).filter(Boolean).join("-");
}

/* The layer that all rows are of. */
function onlyLayer(columns, rows) {
  const layers = new Set(rows.map((row) => row[columns.indexOf("layer")] ?? ""));
  return layers.size === 1 ? [...layers][0] : "";
}

/* The numbers as RFC 4180 has them. Text that a spreadsheet would run as a formula gets an apostrophe. */
function csvOf({ columns, rows, metrics }) {
  const cell = (content) => {
    if (content === null || content === undefined) return "";
    if (typeof content === "number") return shortest(content, metrics);
    const text = /^[=+\-@\t\r\n]/.test(content) ? `'${content}` : String(content);
    return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  return [columns, ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

function jsonOf({ id, caption, metrics, selection, columns, rows }) {
  const about = ({ variable, title, unit, formula, null: expected }) => ({ name: variable, title, unit, formula, null: expected });
  const plainRows = rows.map((row) => row.map((content) => (typeof content === "number" ? Number(shortest(content, metrics)) : content)));
  return JSON.stringify({ headmix: DATA.headmix, model: DATA.model, panel: id, caption, metrics: metrics.map(about), selection, precision: DATA.precision, columns, rows: plainRows });
}

/* A number in as few digits as tell it from others: the page holds single precision, and of very many
   numbers less. */
function shortest(number, metrics) {
  if (metrics.some((metric) => metric.value.numbers?.bits < 23)) return String(Number(number.toPrecision(6)));
  const digits = range(9).find((n) => Math.fround(number.toPrecision(n + 1)) === Math.fround(number));
  return String(digits === undefined ? number : Number(number.toPrecision(digits + 1)));
}

/* A picture that stands alone: on light paper, with what it shows and of which model above it. */
async function pictureOf({ id, caption, metrics }, kind) {
  const Plotly = await library();
  const { traces, layout, paper, ink } = inLight(() => ({ ...fit(PANELS[id].draw(), 900), paper: colour("panel"), ink: colour("ink") }));
  const about = [DATA.model.slice(0, 100), ...metrics.map(quantity), `headmix ${DATA.headmix}`];
  const title = lines(caption, 96).map(plain);
  const small = lines(about.join(" · "), 120).map(plain);
  const above = 20 * title.length + 16 * small.length + 22;
  const size = { width: 900, height: layout.height + above };
  const picture = await Plotly.toImage({
    data: traces, config: CONFIG,
    layout: {
      ...layout, ...size, paper_bgcolor: paper, margin: { ...layout.margin, t: layout.margin.t + above },
      title: {
        text: title.join("<br>"), subtitle: { text: small.join("<br>"), font: { size: 11 } }, font: { size: 15, color: ink },
        x: 0, xref: "container", xanchor: "left", y: 1, yref: "container", yanchor: "top", pad: { l: 16, t: 14 },
      },
    },
  }, { format: kind, scale: kind === "png" ? 2 : 1, imageDataOnly: true, ...size });
  return kind === "svg" ? picture : Uint8Array.from(atob(picture), (c) => c.charCodeAt(0));
}

/* What a function makes of the light colours, whatever the page shows. */
function inLight(make) {
  const shown = theme();
  document.documentElement.dataset.theme = "light";
  try { return make(); } finally { document.documentElement.dataset.theme = shown; }
}

/* Text in lines of at most so many letters. */
function lines(text, most) {
  const found = [""];
  for (const word of text.split(/\s+/).flatMap((w) => w.match(new RegExp(`.{1,${most}}`, "gs")) ?? [])) {
    if (found.at(-1).length + word.length < most) found.push(`${found.pop()} ${word}`.trim());
    else found.push(word);
  }
  return found;
}
