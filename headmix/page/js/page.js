/* State in, page out: choose() changes the state, render() shows it. */

const first = (...shapes) => ofShape(...shapes)[0]?.name;

const DEFAULTS = { over: "mean", scale: "value", position: "in", run: "difference", label: "0" };

const state = {
  layer: Math.max(0, DATA.valid.indexOf(true)), head: 0,
  map: (DATA.compared && first("map")) || first("matrix", "map", "cross"), ...DEFAULTS, // what changed most plainly
  profile: first("profile", "map"), matrix: first("matrix"), spectrum: first("spectrum", "layer_spectrum"), axis: "linear",
  cross: first("cross"), ends: "layers", labelled: first("labelled"), label: "0",
};

function choose(change) {
  Object.assign(state, change);
  if (!headExists(state.layer, state.head)) state.head = 0;
  settle();
  const address = new URLSearchParams({ ...state, layer: DATA.layers[state.layer] });
  history.replaceState(null, "", `#${address}`);
  render();
}

/* A choice that its panel does not offer becomes the first that it does. */
function settle() {
  for (const panel of Object.values(PANELS)) {
    for (const [name, offered] of Object.entries(panel.offers())) {
      if (!offered?.some(([value]) => value === state[name])) state[name] = offered?.[0]?.[0] ?? DEFAULTS[name];
    }
  }
}

/* What the address says, as far as it makes sense here. */
function readAddress() {
  const said = new URLSearchParams(location.hash.slice(1));
  const change = {};
  for (const name of Object.keys(state)) if (said.has(name)) change[name] = said.get(name);
  if ("layer" in change) change.layer = DATA.layers.indexOf(change.layer);
  if ("head" in change) change.head = Number(change.head);
  if (!POSITIONS.some(([value]) => value === change.position)) delete change.position;
  if (!RUNS.some(([value]) => value === change.run)) delete change.run;
  if (!(change.layer >= 0)) delete change.layer;
  if (!Number.isInteger(change.head) || !(change.head >= 0 && change.head < DATA.heads)) delete change.head;
  Object.assign(state, change);
  settle();
  return said.has("layer");
}

const POSITIONS = [["in", "as it is"], ["out", "taken out"]];
const RUNS = [["difference", "B − A"], ["A", "A"], ["B", "B"]];

function render() {
  const offered = Object.assign(
    { position: DATA.metrics.some((metric) => metric.within) ? POSITIONS : null, run: DATA.compared ? RUNS : null },
    { layer: DATA.layers.map((name, i) => [String(i), name]), head: range(DATA.heads).filter((h) => headExists(state.layer, h)).map((h) => [String(h), DATA.labels.head[h]]) },
    ...Object.values(PANELS).map((panel) => panel.offers()),
  );
  for (const select of document.querySelectorAll("select[data-state]")) fill(select, offered[select.dataset.state], state[select.dataset.state]);
  if (DATA.heads) drawCard();
  for (const [id, panel] of Object.entries(PANELS)) if (panel.seen || panel.possible) show(id, panel);
}

let plotly = null;

/* plotly.js travels compressed; it is unpacked when the first figure comes into view. */
function library() {
  plotly ??= (async () => {
    const packed = Uint8Array.from(atob(byId("plotly").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const source = await new Response(stream).text();
    keepOutMapStyles(source);
    document.head.append(element("script", {}, source)); // runs at once; the policy knows its hash
    return window.Plotly;
  })();
  return plotly;
}

/* plotly.js adds styles for street maps unless an element of a certain id says they are there. There
   are no maps here, and the policy would refuse them. */
function keepOutMapStyles(source) {
  const id = /getElementById\("([0-9a-f]{64})"\)/.exec(source)?.[1];
  if (id) document.head.append(element("meta", { id }));
}

const CONFIG = { displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "", modeBarButtons: [["toImage"]], toImageButtonOptions: { format: "svg" } };

async function show(id, panel) {
  byId(id).hidden = !(panel.possible?.() ?? true);
  if (byId(id).hidden) return;
  const drawn = JSON.stringify([theme(), state.position, state.run, ...panel.depends.map((name) => state[name])]);
  if (panel.drawn === drawn) return;
  panel.drawn = drawn;
  const figure = panel.draw();
  byId(`${id}-caption`).textContent = panel.caption();
  const plot = byId(`${id}-plot`);
  plot.setAttribute("aria-label", `${panel.caption()} The numbers are in the table below.`);
  showTable(id, figure);
  const Plotly = await library();
  if (panel.drawn !== drawn) return; // a later choice overtook this one
  await Plotly.react(plot, figure.traces, figure.layout, CONFIG);
  plot.dataset.ready = "true";
  if (panel.click && !panel.listens) {
    panel.listens = true;
    plot.on("plotly_click", ({ points: [point] }) => panel.click(Array.isArray(point.pointIndex) ? point.pointIndex : [point.curveNumber, point.x]));
  }
}

/* The table twin is built when it is opened, and again when the figure changes while it is open. */
function showTable(id, figure) {
  const place = byId(`${id}-table`);
  const details = place.closest("details");
  const build = () => details.open && place.replaceChildren(figure.table());
  details.ontoggle = build;
  build();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").setAttribute("aria-pressed", String(name === "dark"));
}

function start() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => { setTheme(event.matches ? "dark" : "light"); render(); });
  byId("theme").addEventListener("click", () => { setTheme(theme() === "dark" ? "light" : "dark"); render(); });
  for (const select of document.querySelectorAll("select[data-state]")) {
    const name = select.dataset.state;
    select.addEventListener("change", () => choose({ [name]: name === "layer" || name === "head" ? Number(select.value) : select.value }));
  }
  byId("overview-plot").addEventListener("keydown", (event) => {
    const step = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const clamp = (value, n) => Math.min(n - 1, Math.max(0, value));
    choose({ layer: clamp(state.layer + step[0], DATA.layers.length), head: clamp(state.head + step[1], DATA.heads) });
  });
  for (const [id, panel] of Object.entries(PANELS)) {
    if (Object.values(panel.offers()).some((offered) => offered?.length === 0)) {
      byId(id).hidden = true; // nothing of this shape was measured
      document.querySelector(`.bar a[href="#${id}"]`)?.remove();
      delete PANELS[id];
    }
  }
  addEventListener("hashchange", () => { if (readAddress()) render(); });
  readAddress();
  render();
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (isIntersecting) { PANELS[target.id].seen = true; show(target.id, PANELS[target.id]); }
    }
  }, { rootMargin: "200px" });
  for (const id of Object.keys(PANELS)) seen.observe(byId(id));
  addEventListener("beforeprint", () => { for (const panel of Object.values(PANELS)) panel.seen = true; render(); });
  if (!DATA.heads) byId("card").hidden = true;
}

start();
