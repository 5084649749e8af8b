/* Who reads whom: heads of all layers as nodes, and an edge from each that writes to each that reads
   it, where what is read lies further above the null than a threshold; of what may be negative, as the
   changes of a comparison, on either side of it. */

PANELS.graph = {
  depends: ["graph", "beyond", "edges", "layers", "layer", "head", "other"],
  offers: () => ({
    graph: options(metricsOf("cross").filter((metric) => metric.directed)),
    beyond: [["auto", `so much that ≤ ${EDGES} show`], ...[2, 3, 5, 10, 20, 50].map((sd) => [String(sd), `${sd} sd`])],
    edges: [["all", "all heads"], ["head", "the chosen head"]],
  }),
  draw: () => graphFigure(graphOf(named(state.graph))),
  caption: () => graphCaption(graphOf(named(state.graph))),
  click(_, { customdata: place }) {
    if (place?.pair) choosePair(named(state.graph), place.pair);
    else if (place) choose({ layer: place.layer, head: headOf(named(state.graph), place.layer, place.place) });
  },
};

const EDGES = 60; // that many can still be told apart
const MOST_EDGES = 600; // a browser's limit, not the eye's

/* How far above its null a pair lies, or of what may be negative how far away: in the null's sd where
   that is known. */
function beyondNull(metric, { value, mean, z }) {
  const above = Number.isNaN(z) ? value - (mean || 0) : z;
  return metric.signed ? Math.abs(above) : above;
}

/* The pairs considered, the threshold, and the pairs beyond it, the furthest first. */
function graphOf(metric) {
  const layers = new Set(shownLayers());
  const own = { layer: state.layer, place: unitOf(metric, state.layer, state.head) };
  const u = unit(metric);
  const far = (p) => beyondNull(metric, p);
  const isOwn = ({ at }) => (at.layer === own.layer && at[u] === own.place) || (at.layer_b === own.layer && at[u + "_b"] === own.place);
  const considered = pairs(metric).filter(({ at }) => layers.has(at.layer) && layers.has(at.layer_b)).filter((p) => state.edges === "all" || isOwn(p))
    .sort((a, b) => far(b) - far(a));
  const threshold = state.beyond === "auto" ? automatic(considered, far) : Number(state.beyond);
  const beyond = considered.filter((p) => far(p) >= threshold);
  return { metric, layers: [...layers], considered, threshold, beyond, edges: beyond.slice(0, MOST_EDGES), isOwn };
}

/* As round a number of sd as leaves at most EDGES pairs beyond it, and at least half as many where
   there are more; never less than 2. Without a known sd, what the last of them has. */
function automatic(sorted, far) {
  if (!sorted.length) return 2;
  if (Number.isNaN(sorted[0].z)) return far(sorted[Math.min(EDGES, sorted.length) - 1]);
  const next = sorted.length > EDGES ? far(sorted[EDGES]) : 0;
  if (next < 2) return 2;
  for (let digits = 2; digits < 8; digits += 1) {
    const step = 10 ** (Math.floor(Math.log10(next)) + 1 - digits);
    const threshold = Number(((Math.floor(next / step) + 1) * step).toPrecision(digits + 1));
    if (far(sorted[EDGES / 2]) >= threshold) return threshold;
  }
  return next;
}

/* How many pairs of heads in different layers there are: of those shown, or with the chosen head. */
function pairsThereAre(metric, layers) {
  const heads = layers.map((layer) => range(size(metric, unit(metric))).filter((place) => placeExists(metric, layer, place)).length);
  const all = heads.reduce((a, b) => a + b, 0);
  const within = heads.reduce((sum, n) => sum + n * n, 0);
  if (state.edges === "head") return layers.includes(state.layer) ? all - heads[layers.indexOf(state.layer)] : 0;
  return (all * all - within) / 2;
}

function graphCaption({ metric, layers, considered, threshold, beyond, edges }) {
  const inSd = considered.some((p) => !Number.isNaN(p.z));
  const where = state.edges === "head" ? `that ${placeName({ layer: state.layer, head: state.head })} writes or reads` : `of ${unitsOf(metric)} in different layers${state.layers ? " shown" : ""}`;
  const said = [`${metric.title}: ${beyond.length} of ${considered.length} pairs ${where} lie at least ${number(threshold, 3)}${inSd ? " null sd" : ""} ${metric.signed ? "away from" : "above"} the null.`];
  if (metric.value.at) said.push(`There are ${pairsThereAre(metric, layers)}; the page holds only the strongest of each head, so more may lie there.`);
  else if (inSd) {
    const chance = considered.length * upperTail(threshold) * (metric.signed ? 2 : 1);
    said.push(`If values of unrelated heads scattered normally, ${chance < 0.5 ? "fewer than one" : `about ${number(chance, 2)}`} of so many would.`);
  }
  if (edges.length < beyond.length) said.push(`The ${edges.length} furthest are drawn.`);
  return said.join(" ");
}

/* How much of a normal distribution lies more than t sd above its mean, t ≥ 0 (Abramowitz and Stegun
   26.2.17, to 8 decimals). */
function upperTail(t) {
  const k = 1 / (1 + 0.2316419 * t);
  const polynomial = [1.330274429, -1.821255978, 1.781477937, -0.356563782, 0.31938153].reduce((sum, c) => sum * k + c, 0) * k;
  return (Math.exp((-t * t) / 2) / Math.sqrt(2 * Math.PI)) * polynomial;
}

/* The places along an edge from [x, y] to [x, y], as a function of how far along: bowed outwards the
   more layers it skips, so as not to run through the heads between. */
function bow([x0, y0], [x1, y1], last) {
  const side = Math.min(0.28 * (Math.abs(y1 - y0) - 1), 1 + last / 20) * (x0 + x1 <= last ? -1 : 1);
  return (t) => {
    const x = x0 + (x1 - x0) * t + side * 4 * t * (1 - t);
    return [Math.max(-0.8, Math.min(last + 0.8, x)), y0 + (y1 - y0) * t];
  };
}

/* Dots stand at the golden section: in the middle, those of two edges that cross would coincide. */
const DOT = (Math.sqrt(5) - 1) / 2;
const SEGMENTS = 12;

/* Edges as one broken line, and a dot on each to point at, nearer the head that reads. */
function edgeTraces(metric, edges, layers, name, style) {
  if (!edges.length) return [];
  const u = unit(metric);
  const curves = edges.map(({ at }) => bow([at[u], layers.indexOf(at.layer)], [at[u + "_b"], layers.indexOf(at.layer_b)], size(metric, u) - 1));
  const path = (i) => curves.flatMap((curve) => [...range(SEGMENTS + 1).map((k) => curve(k / SEGMENTS)[i]), null]);
  const dots = curves.map((curve) => curve(DOT));
  return [
    { type: "scatter", mode: "lines", name, showlegend: true, x: path(0), y: path(1), hoverinfo: "skip", line: { width: style.width, color: style.colour }, opacity: style.opacity },
    {
      type: "scatter", mode: "markers", showlegend: false, x: dots.map(([x]) => x), y: dots.map(([, y]) => y), customdata: edges.map(({ at }) => ({ pair: at })),
      text: edges.map((p) => hover(pairName(metric, p.at), metric, p)), hovertemplate: "%{text}<extra></extra>", marker: { size: style.dot, color: style.colour },
    },
  ];
}

/* Every head as a dot, those with an edge strong. */
function nodeTrace(metric, layers, edges) {
  const u = unit(metric);
  const busy = new Map();
  for (const { at } of edges) for (const [end, what] of [["", "read by"], ["_b", "reads"]]) {
    const key = `${at["layer" + end]},${at[u + end]}`;
    busy.set(key, { ...busy.get(key), [what]: (busy.get(key)?.[what] ?? 0) + 1 });
  }
  const nodes = layers.flatMap((layer, y) => range(size(metric, u)).filter((place) => placeExists(metric, layer, place)).map((place) => ({ layer, place, y, busy: busy.get(`${layer},${place}`) })));
  const text = ({ layer, place, busy: found }) => [`<b>${plain(placeName({ layer, [u]: place }))}</b>`, ...Object.entries(found ?? {}).map(([what, n]) => `${what} ${n}`)].join("<br>");
  return {
    type: "scatter", mode: "markers", showlegend: false, x: nodes.map((n) => n.place), y: nodes.map((n) => n.y), customdata: nodes.map(({ layer, place }) => ({ layer, place })),
    text: nodes.map(text), hovertemplate: "%{text}<extra></extra>",
    marker: { size: nodes.map((n) => (n.busy ? 9 : 5)), color: nodes.map((n) => (n.busy ? colour("accent") : colour("line"))), line: { width: 1, color: colour("muted") } },
  };
}

function graphFigure({ metric, layers, edges, isOwn }) {
  const u = unit(metric);
  const own = edges.filter(isOwn);
  const labels = DATA.labels[u];
  const ringed = marks(metric, layers).map(({ row, column, second }) => ({ x: column, y: row, value: NaN, low: NaN, high: NaN, second }));
  const chosen = edges.filter((p) => isChosenPair(metric, p.at));
  return {
    metrics: [metric],
    traces: [
      ...edgeTraces(metric, edges.filter((p) => !isOwn(p)), layers, "read by a later layer", { width: 1, colour: colour("muted"), opacity: 0.55, dot: 4 }),
      ...edgeTraces(metric, own, layers, "into and out of the chosen head", { width: 2, colour: colour("warm"), opacity: 1, dot: 6 }),
      ...edgeTraces(metric, chosen, layers, "the chosen pair", { width: 4, colour: colour("warm"), opacity: 1, dot: 8 }),
      nodeTrace(metric, layers, edges), ...rings(ringed),
    ],
    layout: layout(Math.min(900, Math.max(260, 62 * layers.length)) + 70, {
      showlegend: true, margin: { l: 56, r: 12, t: 30, b: 44 },
      xaxis: axis(unitsOf(metric, 1), labels, { showgrid: false, range: [-1, labels.length] }),
      yaxis: axis("layer", layerNames(layers), { showgrid: false, range: [-0.5, layers.length - 0.5] }),
    }),
    table: () => table(["written by", "read by", metric.title, "null ± sd", zNull()], edges.map((p) => [placeName(p.at), placeName(p.at, "_b"), p.value, nullText(p), p.z])),
    rows: () => longForm(metric, edges),
  };
}
