/* The panels: each says which choices it depends on, which it offers, and what to draw for them. One
   file a panel, in panels/. */

const PANELS = {};

/* The chosen head and, of a chosen pair, the other one: `second`. */
function chosenHeads() {
  const other = state.other && { ...state.other, second: true };
  return [{ layer: state.layer, head: state.head }, other].filter(Boolean);
}

/* Where they are in a grid with a row for each of these layers and a column for each head. */
function marks(metric, layers) {
  return chosenHeads()
    .map(({ layer, head, second }) => ({ row: layers.indexOf(layer), column: unitOf(metric, layer, head), second }))
    .filter(({ row }) => row >= 0);
}

function unitsOf(metric, n = 2) {
  return `${unit(metric) === "kv_head" ? "KV head" : "head"}${n === 1 ? "" : "s"}`;
}

function layerNames(layers) {
  return layers.map((layer) => DATA.layers[layer]);
}

function options(metrics) {
  return metrics.map((metric) => [metric.name, metric.title, metric.group]);
}

const NOTHING = { value: NaN, mean: NaN, sd: NaN, low: NaN, high: NaN, z: NaN };
