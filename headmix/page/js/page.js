/* The choices shown: figures, selects, theme, and what the reader does. */

function render() {
  const layers = DATA.layers.map((name, i) => [String(i), name]);
  const shown = shownLayers();
  const offered = Object.assign(
    { position: DATA.metrics.some((metric) => metric.within) ? POSITIONS : null, run: DATA.compared ? RUNS : null },
    { layer: layers, head: headsOf(state.layer).map((h) => [String(h), DATA.labels.head[h]]) },
    { from: layers.length > 1 ? layers : null, to: layers.length > 1 ? layers : null },
    ...Object.values(PANELS).map((panel) => panel.offers()),
  );
  const chosen = { ...state, from: shown[0], to: shown.at(-1) };
  for (const select of document.querySelectorAll("select[data-state]")) fill(select, offered[select.dataset.state], chosen[select.dataset.state]);
  if (DATA.heads) drawCard();
  for (const [id, panel] of Object.entries(PANELS)) if (panel.seen || panel.possible) show(id, panel);
}

/* What a select changes: numbers are places; one end of a range takes the other along. */
function changeOf(name, value) {
  if (name === "layer" || name === "head") return { [name]: Number(value) };
  if (name !== "from" && name !== "to") return { [name]: value };
  const shown = shownLayers();
  const from = name === "from" ? Number(value) : Math.min(shown[0], Number(value));
  const to = name === "to" ? Number(value) : Math.max(shown.at(-1), Number(value));
  return { layers: someLayers({ from, to }) };
}

let plotly = null;

/* plotly.js travels compressed; it is unpacked when the first figure comes into view. */
function library() {
  plotly ??= (async () => {
    const source = await (await gunzip(byId("plotly").textContent)).text();
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

const CONFIG = { displayModeBar: false, showSendToCloud: false, plotlyServerURL: "" };

async function show(id, panel) {
  byId(id).hidden = !(panel.possible?.() ?? true);
  if (byId(id).hidden) return;
  const drawn = JSON.stringify([theme(), innerWidth, paper.width, state.position, state.run, ...panel.depends.map((name) => state[name])]);
  if (panel.drawn === drawn) return;
  panel.drawn = drawn;
  if (panel.build) return panel.build(); // no figure
  const width = paper.width ?? byId(`${id}-plot`).clientWidth;
  const figure = fit(panel.draw(), width);
  if (width) figure.layout.width = width;
  const caption = panel.caption() + (figure.says ?? "");
  byId(`${id}-caption`).textContent = caption;
  const plot = byId(`${id}-plot`);
  plot.setAttribute("aria-label", `${caption} The numbers are in the table below.`);
  showTable(id, figure);
  if (panel.away) { panel.drawn = null; return; } // out of view: the words follow at once, the figure when it is back
  const Plotly = await library();
  if (panel.drawn !== drawn) return; // a later choice overtook this one
  await Plotly.react(plot, figure.traces, figure.layout, CONFIG);
  plot.dataset.ready = "true";
  if (panel.click && !panel.listens) {
    panel.listens = true;
    plot.on("plotly_click", ({ points: [point] }) => panel.click(Array.isArray(point.pointIndex) ? point.pointIndex : [point.curveNumber, point.x], point));
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

/* The button says what it does. */
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "Light" : "Dark";
}

function startTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const set = (isDark) => { setTheme(isDark ? "dark" : "light"); render(); };
  dark.addEventListener("change", (event) => set(event.matches));
  byId("theme").addEventListener("click", () => set(theme() !== "dark"));
}

/* Panels of shapes that were not measured go, and their links with them. */
function dropPanels() {
  for (const [id, panel] of Object.entries(PANELS)) {
    if (!Object.values(panel.offers()).some((offered) => offered?.length === 0)) continue;
    byId(id).hidden = true;
    document.querySelector(`.bar a[href="#${id}"]`)?.remove();
    delete PANELS[id];
  }
}

/* Figures are drawn when they come into view. */
function watchPanels() {
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      const panel = PANELS[target.id];
      panel.away = !isIntersecting;
      if (isIntersecting) { panel.seen = true; show(target.id, panel); }
    }
  }, { rootMargin: "200px" });
  for (const id of Object.keys(PANELS)) seen.observe(byId(id));
  addEventListener("resize", () => { clearTimeout(watchPanels.resized); watchPanels.resized = setTimeout(render, 150); });
}

/* Paper is light and narrow, and has every figure. */
const paper = { width: null };

function watchPrinting() {
  let chosen = theme();
  addEventListener("beforeprint", () => {
    chosen = theme();
    paper.width = 660; // of A4 and of letter, within the usual margins
    setTheme("light");
    for (const panel of Object.values(PANELS)) Object.assign(panel, { seen: true, away: false });
    render();
  });
  addEventListener("afterprint", () => { paper.width = null; setTheme(chosen); render(); });
}

/* What scrolls to a place must know how high the bar is that covers it. */
function watchBar() {
  const bar = document.querySelector(".bar");
  new ResizeObserver(() => document.documentElement.style.setProperty("--bar", `${bar.offsetHeight}px`)).observe(bar);
}

/* Links within the page, typed addresses, back and forward all end here. The address of a section
   names no choice; what is chosen is put back into it. */
function onAddress() {
  if (readAddress()) render();
  else history.replaceState(null, "", `#${address()}`);
}

function start() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  dropPanels();
  settle();
  opening = { ...state };
  readAddress();
  for (const select of document.querySelectorAll("select[data-state]")) {
    select.addEventListener("change", () => choose(changeOf(select.dataset.state, select.value)));
  }
  addEventListener("hashchange", onAddress);
  document.addEventListener("keydown", onKey);
  startTheme();
  startSearch();
  render();
  watchPanels();
  watchPrinting();
  watchBar();
  if (!DATA.heads) byId("card").hidden = true;
  document.documentElement.dataset.started = "true";
}

unpacked.then(start);
