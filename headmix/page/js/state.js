/* What is chosen, and the address that says it. Every choice goes through choose(), and the address
   says all that differs from how the page opens: it is a permalink, and back undoes a choice. */

const first = (...shapes) => ofShape(...shapes)[0]?.name;

const DEFAULTS = { over: "mean", scale: "value", position: "in", run: "difference", label: "0" };

const POSITIONS = [["in", "as it is"], ["out", "taken out"]];
const RUNS = [["difference", "B − A"], ["A", "A"], ["B", "B"]];

/* The choices of one metric each. They follow the page's metric where they offer it. */
const METRIC_CHOICES = ["map", "profile", "matrix", "spectrum", "labelled", "cross", "graph", "followed"];

const state = {
  layer: Math.max(0, DATA.valid.indexOf(true)), head: 0,
  other: null, // { layer, head }, the second head of the chosen pair
  metric: null, // the metric chosen last, for the whole page
  layers: null, // { from, to }, the layers that model-wide panels show; null is all of them
  map: (DATA.compared && first("map")) || first("matrix", "map", "cross"), ...DEFAULTS, // what changed most plainly
  profile: first("profile", "map"), matrix: first("matrix"), spectrum: first("spectrum", "layer_spectrum"), axis: "linear",
  cross: first("cross"), ends: "layers", labelled: first("labelled"), label: "0",
  x: first("map", "matrix"), y: first("matrix", "cross", "labelled"), // heads against heads; what else panels offer opens as its first
};

/* How the page opens; set at the start, when every panel has said what it offers. */
let opening = null;

/* The layers that model-wide panels show, by their index. */
function shownLayers() {
  const { from, to } = state.layers ?? { from: 0, to: DATA.layers.length - 1 };
  return range(DATA.layers.length).filter((layer) => layer >= from && layer <= to);
}

/* Change what is chosen: { layer, head } alone drops the pair, and the metric of one panel becomes
   that of every panel that offers it. `quick` steps share one entry of the browser's history. */
function choose(change, { quick = false } = {}) {
  const before = address();
  const metric = change.metric ?? METRIC_CHOICES.map((name) => change[name]).find(Boolean);
  if (("layer" in change || "head" in change) && !change.other) state.other = null;
  Object.assign(state, change, metric && { metric, ...following(metric) });
  settle();
  if (address() === before) return;
  record(quick, before);
  render();
}

/* What the choices of single panels become when this is the metric of the page. */
function following(metric) {
  const offered = Object.values(PANELS).flatMap((panel) => Object.entries(panel.offers()));
  const follows = ([name, values]) => METRIC_CHOICES.includes(name) && values?.some(([value]) => value === metric);
  return Object.fromEntries(offered.filter(follows).map(([name]) => [name, metric]));
}

/* A choice that its panel does not offer becomes what it opens with, or the first that it does. */
function settle() {
  if (DATA.heads && !headExists(state.layer, state.head)) state.head = 0;
  const { other } = state;
  if (other && (other.layer === state.layer && other.head === state.head)) state.other = null;
  for (const panel of Object.values(PANELS)) {
    for (const [name, offered] of Object.entries(panel.offers())) {
      const possible = (choice) => offered?.some(([value]) => value === choice);
      if (!possible(state[name])) state[name] = possible(opening?.[name]) ? opening[name] : offered?.[0]?.[0] ?? DEFAULTS[name];
    }
  }
}

/* The state in words. What follows from the rest is not said. */
function address() {
  const { layer, head, other, metric, layers, ...single } = state;
  const said = new URLSearchParams({ layer: DATA.layers[layer], head });
  if (other) said.set("with", placeName(other));
  if (metric) said.set("metric", metric);
  if (layers) said.set("layers", `${DATA.layers[layers.from]}-${DATA.layers[layers.to]}`);
  const usual = { ...opening, ...(metric && following(metric)) };
  for (const [name, value] of Object.entries(single)) if (value !== usual[name] && value !== undefined) said.set(name, value);
  return said.toString();
}

const NAMES = ["layer", "head", "with", "metric", "layers"];

/* Take the state from the address, as far as what it says makes sense here. Returns false where it
   names no choice, as the address of a section does: a choice has "=". */
function readAddress() {
  if (location.hash.length > 1 && !location.hash.includes("=")) return false;
  const said = new URLSearchParams(location.hash.slice(1));
  const asked = [...said.keys()].some((name) => NAMES.includes(name) || Object.hasOwn(opening, name));
  if (!asked && location.hash.length > 1) return false;
  const layer = DATA.layers.indexOf(said.get("layer"));
  const head = DATA.labels.head?.indexOf(said.get("head")) ?? -1;
  const metric = DATA.metrics.find(({ name }) => name === said.get("metric"))?.name ?? null;
  Object.assign(state, opening, { metric, ...(metric && following(metric)), other: headNamed(said.get("with") ?? ""), layers: layersNamed(said.get("layers") ?? "") });
  if (layer >= 0) state.layer = layer;
  if (head >= 0 && headExists(state.layer, head)) state.head = head;
  for (const name of Object.keys(opening)) if (said.has(name) && !NAMES.includes(name) && name !== "other") state[name] = said.get(name);
  if (!POSITIONS.some(([value]) => value === state.position)) state.position = DEFAULTS.position;
  if (!RUNS.some(([value]) => value === state.run)) state.run = DEFAULTS.run;
  settle();
  return true;
}

/* "L2-L5": any two names around a hyphen, which may be part of a name. */
function layersNamed(text) {
  const places = range(text.length).filter((i) => text[i] === "-");
  const found = places.map((i) => ({ from: DATA.layers.indexOf(text.slice(0, i)), to: DATA.layers.indexOf(text.slice(i + 1)) }));
  return someLayers(found.find(({ from, to }) => from >= 0 && to >= from));
}

/* A range of layers; nothing where it leaves none out. */
function someLayers(layers) {
  return layers && (layers.from > 0 || layers.to < DATA.layers.length - 1) ? layers : null;
}

/* Steps that follow each other within a second are one entry, written when they come to rest: the
   browser refuses many entries in little time. */
const rest = { ms: 200, together: 1000, last: -Infinity, timer: null };

function record(quick, before) {
  const now = performance.now();
  const follows = quick && now - rest.last < rest.together;
  if (rest.timer && !follows) history.replaceState(null, "", `#${before}`);
  clearTimeout(rest.timer);
  rest.timer = null;
  rest.last = quick ? now : -Infinity;
  if (!follows) return history.pushState(null, "", `#${address()}`);
  rest.timer = setTimeout(() => { rest.timer = null; history.replaceState(null, "", `#${address()}`); }, rest.ms);
}
