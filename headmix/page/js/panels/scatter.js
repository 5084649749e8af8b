/* Any metric of heads against any other, heads as points. */

PANELS.scatter = {
  depends: ["x", "y", "reduce", "label", "layers", "layer", "head", "other"],
  offers() {
    const all = metricsOf("map", "matrix", "cross", "labelled").filter(unit);
    const offered = options(all.length > 1 ? all : []);
    const both = [named(state.x), named(state.y)].filter(Boolean);
    const paired = both.filter((metric) => metric.shape === "matrix" || metric.shape === "cross");
    const max = ["max", [...new Set(paired.map(strongestOf))].join(" or ")];
    return {
      x: offered, y: offered,
      reduce: paired.length ? both.some((metric) => metric.value.at) ? [max] : [["mean", "mean over the others"], max] : null,
    };
  },
  draw() {
    const [x, y] = [named(state.x), named(state.y)];
    const points = scatterPoints(x, y);
    byId("scatter").classList.toggle("unlabelled", ![x, y].some((metric) => metric.shape === "labelled"));
    return scatterFigure(x, y, points, points.filter((p) => p.layer === state.layer));
  },
  caption() {
    const [x, y] = [named(state.x), named(state.y)];
    const points = scatterPoints(x, y);
    const rho = spearman(points.map((p) => p.x.value), points.map((p) => p.y.value));
    const all = shownLayers().reduce((n, layer) => n + headsOf(layer).length, 0);
    const among = points.length < all ? `, of ${all}, that have both` : "";
    const said = Number.isNaN(rho) ? "" : ` Rank correlation (Spearman) ${rho.toFixed(2).replace("-", "−")} over n = ${points.length} heads${among}: a description of these heads, which are not independent of each other, and not evidence of a cause.`;
    return `${scatterTitle(y)} against ${lower(scatterTitle(x))}.${said}`;
  },
  click(_, { customdata: place }) { if (place) choose({ layer: place.layer, head: place.head }); },
};

function scatterTitle(metric) {
  if (metric.shape === "labelled") return `${metric.title}: ${DATA.labels.label[state.label]}`;
  if (metric.shape === "map") return metric.title;
  return `${metric.title} (${state.reduce === "max" ? `${strongestOf(metric)} pair` : "mean over pairs"})`;
}

/* A head's number by any metric that has one for heads, for pairs, or for the chosen label. */
function ofHead(metric, layer, head) {
  if (metric.shape !== "labelled") return perHead(metric, layer, head, state.reduce);
  return look(metric, { layer, label: Number(state.label), [unit(metric)]: unitOf(metric, layer, head) });
}

/* The heads of the layers shown that have both numbers. */
function scatterPoints(x, y) {
  return shownLayers().flatMap((layer) => headsOf(layer).map((head) => ({ layer, head, x: ofHead(x, layer, head), y: ofHead(y, layer, head) })))
    .filter((p) => Number.isFinite(p.x.value) && Number.isFinite(p.y.value));
}

/* Rank correlation, ties at their mean rank; NaN where either does not vary. */
function spearman(a, b) {
  const [p, q] = [ranks(a), ranks(b)];
  const middle = (a.length + 1) / 2;
  const dot = (u, v) => u.reduce((sum, x, i) => sum + (x - middle) * (v[i] - middle), 0);
  const size = Math.sqrt(dot(p, p) * dot(q, q));
  return size > 0 ? dot(p, q) / size : NaN;
}

function ranks(numbers) {
  const order = range(numbers.length).sort((i, j) => numbers[i] - numbers[j]);
  const found = new Array(numbers.length);
  for (let from = 0, to; from < order.length; from = to) {
    for (to = from; to < order.length && numbers[order[to]] === numbers[order[from]];) to += 1;
    for (let k = from; k < to; k += 1) found[order[k]] = (from + to + 1) / 2;
  }
  return found;
}

/* The null along one axis: that of the chosen layer, as a dashed line across, with a band of two sd
   where the spread of a single head is known. */
function nullShapes(points, axisName) {
  const own = points.map((p) => p[axisName]);
  const mean = average(own.map((found) => found.mean));
  if (Number.isNaN(mean)) return [];
  const sd = average(own.map((found) => found.sd));
  const [along, across] = axisName === "x" ? ["x", "y"] : ["y", "x"];
  const whole = { [`${across}ref`]: "paper", [`${across}0`]: 0, [`${across}1`]: 1, layer: "below" };
  const line = { ...whole, type: "line", [`${along}0`]: mean, [`${along}1`]: mean, line: { dash: "dash", width: 1.5, color: colour("muted") } };
  const band = { ...whole, type: "rect", [`${along}0`]: mean - 2 * sd, [`${along}1`]: mean + 2 * sd, fillcolor: colour("band"), line: { width: 0 } };
  return sd > 0 ? [band, line] : [line];
}

/* An axis that holds every point and the null. */
function scatterRange(points, own, axisName) {
  const nulls = own.map((p) => p[axisName].mean).filter(Number.isFinite);
  const values = [...points.map((p) => p[axisName].value), ...nulls];
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const margin = 0.06 * (high - low || Math.abs(high) || 1);
  return [low - margin, high + margin];
}

function scatterFigure(x, y, points, own) {
  const text = (p) => [`<b>${plain(placeName(p))}</b>`, ...hoverLines(x, p.x), ...hoverLines(y, p.y)].join("<br>");
  const dots = (found, name, marker) => ({
    type: "scatter", mode: "markers", name, showlegend: true, x: found.map((p) => p.x.value), y: found.map((p) => p.y.value),
    text: found.map(text), hovertemplate: "%{text}<extra></extra>", customdata: found.map(({ layer, head }) => ({ layer, head })), marker: { line: { width: 0 }, ...marker },
  });
  const ringed = chosenHeads().map((one) => ({ ...points.find((p) => p.layer === one.layer && p.head === one.head), second: one.second })).filter((p) => p.x);
  const rest = points.filter((p) => p.layer !== state.layer);
  const around = own.length ? own : points;
  const quantityOf = (metric) => quantity({ ...metric, title: scatterTitle(metric) });
  return {
    metrics: [x, y],
    traces: [
      ...(rest.length ? [dots(rest, "other layers", { size: 6, color: colour("muted"), opacity: 0.4 })] : []),
      dots(own, plain(DATA.layers[state.layer]), { size: 8, color: colour("accent"), opacity: 0.9 }),
      ...rings(ringed.map((p) => ({ x: p.x.value, y: p.y.value, second: p.second }))),
    ],
    layout: layout(400, {
      showlegend: true, margin: { l: 56, r: 12, t: 30, b: 44 }, shapes: [...nullShapes(around, "x"), ...nullShapes(around, "y")],
      xaxis: axis(quantityOf(x), null, { range: scatterRange(points, around, "x") }), yaxis: axis(quantityOf(y), null, { range: scatterRange(points, around, "y") }),
    }),
    table: () => table(["head", scatterTitle(x), "null ± sd", scatterTitle(y), "null ± sd"], points.map((p) => [placeName(p), p.x.value, nullText(p.x), p.y.value, nullText(p.y)])),
    rows: () => ({
      columns: ["layer", "head", `x_${x.variable}`, `y_${y.variable}`, "x_null_mean", "y_null_mean"],
      rows: points.map((p) => [DATA.layers[p.layer], Number(DATA.labels.head[p.head]), p.x.value, p.y.value, ...[p.x.mean, p.y.mean].map((m) => (Number.isFinite(m) ? m : null))]),
    }),
  };
}
