/* Every metric of the pairs of a layer, or of all layers shown, joined in one table: sorted by a click
   on a column's head, filtered, and a click on a row chooses the pair. */

PANELS.joined = {
  depends: ["matrix", "span", "partner", "least", "tell", "sort", "sorting", "layers", "layer", "head", "other"],
  offers() {
    const columns = joinedColumns();
    return {
      sort: columns.length ? ["matrix", "pair", ...columns.map(({ key }) => key)].map((key) => [key, key]) : [],
      sorting: SORTINGS,
      span: DATA.layers.length > 1 ? [["layer", "the chosen layer"], ["shown", "all layers shown"]] : null,
      partner: [["any", "any head"], ["head", "the chosen head"]],
      least: sortedColumn(columns)?.metric.sd ? ["0", "2", "3", "5", "10"].map((sd) => [sd, sd === "0" ? "any" : `at least ${sd} sd`]) : null,
      tell: [["value", "value and interval"], ["null", "value and null"], ["z", "distance from null, in sd"]],
    };
  },
  build() {
    const { layer, head, span, partner } = state;
    const other = ["matrix", "tell", "least", "sort", "sorting", "position", "run", "layers"].map((name) => state[name]);
    const view = JSON.stringify([span, partner, ...other, (span !== "shown" || partner === "head") && layer, partner === "head" && head]);
    if (this.view !== view) Object.assign(this, { view, page: 0, ...joinedRows() });
    this.fill();
  },
  /* One page of the rows: a browser slows down under many thousands. */
  fill() {
    const { columns, rows, sorted } = this;
    const from = this.page * ROWS_A_PAGE;
    const shown = rows.slice(from, from + ROWS_A_PAGE);
    const turn = (step, text) => element("button", { type: "button", "data-focus": text, onclick: () => { this.page += step; this.fill(); } }, text);
    byId("joined-caption").textContent = `${joinedCaption(columns[0].metric, sorted)} ${rows.length} pairs${rows.length > ROWS_A_PAGE ? `, ${from + 1} – ${from + shown.length} of them here` : ""}.`;
    refill("joined-table", joinedTable(columns, shown, sorted));
    refill("joined-pages", ...[this.page > 0 && turn(-1, "Previous"), from + shown.length < rows.length && turn(1, "More")].filter(Boolean));
  },
};

const ROWS_A_PAGE = 100;
const SORTINGS = [["far", "furthest from the null first"], ["down", "largest first"], ["up", "smallest first"]];

/* The columns that make sense for pairs of the chosen metric's unit: from the weights, on text, by
   replacing two heads, and last what replacing either does, as two numbers. The chosen metric leads. */
function joinedColumns() {
  const lead = named(state.matrix);
  if (!lead) return [];
  const u = unit(lead);
  const fit = (shape) => metricsOf(shape).filter((metric) => unit(metric) === u);
  const back = ({ layer, i, j }) => ({ layer, [u]: j, [u + "_b"]: i });
  const there = ({ layer, i, j }) => ({ layer, [u]: i, [u + "_b"]: j });
  const ofPair = (metric) => {
    const both = (row) => [there, back].map((at) => look(metric, { ...at(row), layer_b: row.layer }));
    return { key: metric.name, metric, both, ends: (row) => {
      const [a, b] = both(row);
      return Number.isNaN(b.value) || Math.abs(a.value - b.value) <= 1e-4 * Math.abs(a.value) ? [a] : [a, b];
    } };
  };
  const ofEach = (metric) => ({ key: metric.name, metric, each: true, ends: ({ layer, i, j }) => [i, j].map((place) => look(metric, { layer, [u]: place })) });
  const pairsOf = [...fit("matrix"), ...fit("cross").filter((metric) => !metric.directed)].filter((metric) => metric.name !== lead.name);
  const measured = (metric) => (metric.replaced ? 2 : metric.group === "text" ? 1 : 0);
  const rest = pairsOf.sort((a, b) => measured(a) - measured(b));
  return [ofPair(lead), ...rest.map(ofPair), ...fit("map").filter((metric) => metric.replaced).map(ofEach)];
}

/* The column that rows are sorted by; none where they are sorted by number. */
function sortedColumn(columns) {
  return state.sort === "pair" ? null : columns.find(({ key }) => key === state.sort) ?? columns[0];
}

/* How far a number lies from its null: in sd, or else as a difference, or else from 0. */
function farness({ value, mean, z }) {
  return Math.abs(Number.isNaN(mean) ? value : Number.isNaN(z) ? value - mean : z);
}

/* All rows that pass the filters, in order. */
function joinedRows() {
  const columns = joinedColumns();
  const sorted = sortedColumn(columns);
  const u = unit(columns[0].metric);
  const layers = state.span === "shown" ? shownLayers() : [state.layer];
  const own = state.partner === "head" ? unitOf(columns[0].metric, state.layer, state.head) : -1;
  const all = layers.flatMap((layer) => {
    const there = range(size(columns[0].metric, u)).filter((place) => placeExists(columns[0].metric, layer, place));
    return there.flatMap((i) => there.filter((j) => i < j).map((j) => ({ layer, i, j })));
  });
  const least = Number(state.least) || 0;
  const rows = all
    .filter(({ layer, i, j }) => own < 0 || (layer === state.layer && (i === own || j === own)))
    .map((row) => (sorted ? { ...row, key: sortKey(sorted.ends(row)) } : row))
    .filter((row) => !sorted || !least || farthest(sorted.ends(row)) >= least);
  if (sorted) rows.sort((a, b) => byKey(a.key, b.key));
  else if (state.sorting === "up") rows.reverse();
  return { columns, rows, sorted };
}

/* What is not known comes last either way. */
function byKey(a, b) {
  if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);
  return state.sorting === "up" ? a - b : b - a;
}

/* Of one number or two, the one that counts. */
function sortKey(ends) {
  const told = ends.map((p) => (state.sorting === "far" ? farness(p) : state.tell === "z" ? p.z : p.value)).filter((x) => !Number.isNaN(x));
  return told.length ? (state.sorting === "up" ? Math.min : Math.max)(...told) : NaN;
}

function farthest(ends) {
  return Math.max(...ends.map(({ z }) => (Number.isNaN(z) ? -1 : Math.abs(z))));
}

function joinedCaption(lead, sorted) {
  const where = state.span === "shown" ? (state.layers ? "the layers shown" : "every layer") : DATA.layers[state.layer];
  const how = sorted ? `by ${lower(sorted.metric.title)}, ${SORTINGS.find(([key]) => key === state.sorting)[1]}` : "by number";
  const least = Number(state.least) && sorted ? `, only those at least ${state.least} null sd away from its null` : "";
  return `Pairs of ${unitsOf(lead)} of ${state.partner === "head" ? `${DATA.layers[state.layer]} that ${placeName({ layer: state.layer, head: state.head })} is one of` : where}, ${how}${least}:`;
}

function joinedTable(columns, rows, sorted) {
  const head = (key, title, current) => {
    const turned = { far: "other", down: "descending", up: "ascending" }[state.sorting];
    const mark = { far: "⇅", down: "↓", up: "↑" }[state.sorting];
    const next = () => choose({ sort: key, sorting: current ? SORTINGS[(SORTINGS.findIndex(([s]) => s === state.sorting) + 1) % SORTINGS.length][0] : "far" });
    return element("th", { scope: "col", ...(key === "pair" ? {} : { class: "n" }), ...(current ? { "aria-sort": turned } : {}) },
      element("button", { type: "button", class: "sort", "data-focus": `sort ${key}`, onclick: next }, title, current ? ` ${mark}` : ""));
  };
  const heads = [head("pair", "pair", !sorted), ...columns.map((column) => head(column.key, column.metric.title + (column.each ? ", of each" : ""), column === sorted))];
  return element("table", { class: "joined" },
    element("thead", {}, element("tr", {}, ...heads)),
    element("tbody", {}, ...rows.map((row) => joinedRow(columns, row, sorted))));
}

function joinedRow(columns, row, sorted) {
  const lead = columns[0].metric;
  const at = { layer: row.layer, [unit(lead)]: row.i, [`${unit(lead)}_b`]: row.j };
  const name = `${placeName(at)} – ${placeName(at, "_b")}`;
  const current = isChosenPair(lead, at) ? { "aria-current": "true" } : {};
  return element("tr", { ...current, onclick: () => chooseRow(lead, at) },
    element("th", { scope: "row" }, element("button", { type: "button", class: "place", "data-focus": name }, name)),
    ...columns.map((column) => element("td", { class: "n" }, ...told(column.ends(row), column === sorted && state.sorting === "far"))));
}

/* The chosen head stays the first of the pair where it is in it. */
function chooseRow(metric, at) {
  const [one, other] = endsOf(metric, at);
  const own = other.layer === state.layer && unitOf(metric, other.layer, other.head) === unitOf(metric, state.layer, state.head);
  choose(own ? { ...other, other: one } : { ...one, other });
}

/* What a cell says of one number or two, and under it what state.tell asks for, and
   the distance from the null where rows are sorted by it. */
function told(ends, byDistance) {
  if (state.tell === "z") return [ends.map(({ z }) => number(z, 3)).join(" / ")];
  const interval = ends.length === 1 ? intervalText : () => ""; // of two numbers the card has them
  const under = (p) => (state.tell === "null" ? (Number.isNaN(p.mean) ? "" : `null ${nullText(p)}`) : interval(p));
  const small = [...new Set(ends.map(under).filter(Boolean))];
  const z = state.tell === "null" || byDistance ? ends.filter((p) => !Number.isNaN(p.z)).map((p) => number(p.z, 3)) : [];
  return [ends.map(({ value }) => number(value, 3)).join(" / "), ...small.map((text) => element("small", {}, text)), ...(z.length ? [element("small", {}, `z ${z.join(" / ")}`)] : [])];
}

/* The same rows as plain columns, to save: all that pass the filters. */
function joinedList() {
  const { columns, rows, sorted } = joinedRows();
  const u = unit(columns[0].metric);
  const told = columns.map((column) => savedColumn(column, rows));
  const plainNumber = (x) => (Number.isFinite(x) ? x : null);
  return {
    id: "pairs", caption: joinedCaption(columns[0].metric, sorted), metrics: columns.map(({ metric }) => metric), of: state.span === "shown" ? "layers" : DATA.layers[state.layer],
    selection: selected(["span", "partner", "least", "sort", "sorting"]),
    columns: ["layer", u, `${u}_b`, ...told.flatMap(({ heads }) => heads)],
    rows: rows.map((row) => [DATA.layers[row.layer], ...[row.i, row.j].map((place) => Number(DATA.labels[u][place])), ...told.flatMap(({ cells }) => cells(row).map(plainNumber))]),
  };
}

const PARTS_SAVED = [["", "value"], ["_null_mean", "mean"], ["_null_sd", "sd"], ["_low", "low"], ["_high", "high"], ["_z", "z"]];

/* What a column saves: the numbers of both heads; or those of the pair and, where it matters in some
   row which head comes first, those of the other order, called back. */
function savedColumn({ metric: { variable }, each, ends, both }, rows) {
  if (each) return { heads: [variable, `${variable}_b`], cells: (row) => ends(row).map(({ value }) => value) };
  const ways = rows.some((row) => ends(row).length > 1) ? ["", "_back"] : [""];
  return {
    heads: ways.flatMap((way) => PARTS_SAVED.map(([suffix]) => variable + way + suffix)),
    cells: (row) => both(row).slice(0, ways.length).flatMap((p) => PARTS_SAVED.map(([, part]) => p[part])),
  };
}
