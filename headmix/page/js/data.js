"use strict";

/* The numbers: arrays with named axes, looked up by place. */

const DATA = JSON.parse(document.getElementById("data").textContent);

/* They travel as planes of bytes, compressed together; an array is put together when first looked at. */
let PLANES = null;
const unpacked = gunzip(document.getElementById("planes").textContent).then((stream) => stream.arrayBuffer()).then((buffer) => { PLANES = new Uint8Array(buffer); });

async function gunzip(base64) {
  const packed = Uint8Array.fromBase64 ? Uint8Array.fromBase64(base64) : Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")));
}

/* Unsigned numbers, of which all first bytes stand together, then all second ones. */
function whole({ start, n, planes }) {
  const found = new Uint32Array(n);
  for (let plane = 0; plane < planes; plane += 1) {
    for (let i = 0, from = start + plane * n; i < n; i += 1) found[i] |= PLANES[from + i] << (24 - 8 * plane);
  }
  return found;
}

function valuesOf(array) {
  return (array.values ??= array.words ? wordsOf(array) : floats(array.numbers));
}

/* Of numbers that differ little from each to the next, the steps travel. */
function floats(numbers) {
  const raw = whole(numbers);
  if (numbers.steps) for (let i = 1; i < raw.length; i += 1) raw[i] += raw[i - 1];
  return new Float32Array(raw.buffer);
}

function wordsOf({ words, which }) {
  const different = JSON.parse(new TextDecoder().decode(PLANES.subarray(words.start, words.start + words.n)));
  return Array.from(whole(which), (i) => different[i]);
}

/* Of very many pairs only the strongest are held: where each stands, by its place among all. Where
   the order does not matter, it is found by either. */
function keptOf(metric) {
  return (metric.kept ??= (() => {
    const { at, shape: [, H, L_b, H_b] } = metric.value;
    const n = L_b * H_b;
    const kept = new Map();
    let flat = 0;
    whole(at).forEach((step, i) => {
      flat += step;
      kept.set(flat, i);
      if (!metric.directed) kept.set((flat % n) * n + Math.floor(flat / n), i);
    });
    return kept;
  })());
}

/* A metric and its other versions: with position taken out, and as each of two compared runs had it. */
function versions(metric) {
  return metric ? [metric, ...versions(metric.within), ...Object.values(metric.runs)] : [];
}

/* One entry of a part of a metric: `at` gives the index along each axis, and may name axes it lacks. */
function entry(metric, part, at) {
  const array = metric[part];
  if (!array) return NaN;
  const flat = array.half ? ofHalf(array, at) : flatOf(array, at);
  return valuesOf(array)[array.kept ? keptOf(metric).get(flat) : flat] ?? NaN;
}

function flatOf({ dims, shape }, at) {
  let flat = 0;
  for (let i = 0; i < dims.length; i += 1) flat = flat * shape[i] + at[dims[i]];
  return flat;
}

/* Pairs whose order does not matter are held once, and none of a place with itself. */
function ofHalf(array, at) {
  const { dims, shape } = array;
  const ends = (array.ends ??= dims.filter((dim) => dim.endsWith("_b")).length);
  const lead = dims.length - 2 * ends;
  let [n, a, b, flat] = [1, 0, 0, 0];
  for (let i = 0; i < lead; i += 1) flat = flat * shape[i] + at[dims[i]];
  for (let i = lead; i < lead + ends; i += 1) {
    a = a * shape[i] + at[dims[i]];
    b = b * shape[i] + at[dims[i + ends]];
    n *= shape[i];
  }
  if (a === b) return -1;
  if (a > b) [a, b] = [b, a];
  return (flat * n * (n - 1)) / 2 + (a * (2 * n - a - 1)) / 2 + b - a - 1;
}

/* Value, null mean and sd, interval, and distance from the null at one place; NaN where there is
   none. */
function look(metric, at) {
  const [value, mean, sd, below, skew] = ["value", "mean", "sd", "below", "skew"].map((part) => entry(metric, part, at));
  return { at, value, mean, sd, low: value - below, high: value + below + skew, z: sd > 0 ? (value - mean) / sd : NaN };
}

function size(metric, dim) {
  const axis = metric.value.dims.indexOf(dim);
  return axis < 0 ? 1 : metric.value.shape[axis];
}

function range(n) {
  return Array.from({ length: n }, (_, i) => i);
}

/* Every place along some axes, the others held where `at` has them. */
function places(metric, dims, at = {}) {
  return dims.reduce(
    (found, dim) => found.flatMap((place) => range(size(metric, dim)).map((i) => ({ ...place, [dim]: i }))),
    [at],
  );
}

/* The axis that counts heads: "head" or "kv_head". */
function unit(metric) {
  return metric.value.dims.find((dim) => dim === "head" || dim === "kv_head");
}

/* Which place along that axis belongs to a head: itself, or its KV head. */
function unitOf(metric, layer, head) {
  return unit(metric) === "kv_head" ? DATA.kv_of_head[layer][head] : head;
}

/* The head that a place along that axis stands for: the first of its KV group; -1 where the layer has
   fewer groups than others. */
function headOf(metric, layer, place) {
  return unit(metric) === "kv_head" ? DATA.kv_of_head[layer].indexOf(place) : place;
}

/* Whether a layer, of those that differ in their number of heads, has one at that place. */
function placeExists(metric, layer, place) {
  const head = headOf(metric, layer, place);
  return head >= 0 && headExists(layer, head);
}

function isSelf(at) {
  return ["head", "kv_head"].some((u) => u + "_b" in at && at[u] === at[u + "_b"] && !("layer_b" in at && at.layer !== at.layer_b));
}

/* Every pair that was measured, a head with itself aside: of one layer, or all, worked out once. */
function pairs(metric, layer) {
  const measured = (found) => found.filter((at) => !isSelf(at)).map((at) => look(metric, at)).filter((p) => !Number.isNaN(p.value));
  if (layer !== undefined) return measured(places(metric, metric.value.dims.slice(1), { layer }));
  return (metric.pairs ??= measured(metric.value.at ? keptPlaces(metric) : places(metric, metric.value.dims)));
}

function keptPlaces(metric) {
  const { dims, shape } = metric.value;
  return [...keptOf(metric).keys()].map((flat) => {
    const at = {};
    for (let i = dims.length - 1; i >= 0; i -= 1) {
      at[dims[i]] = flat % shape[i];
      flat = Math.floor(flat / shape[i]);
    }
    return at;
  });
}

/* The pairs that one head takes part in: as the first, and as either where it matters which. */
function partners(metric, layer, head) {
  return partnerPlaces(metric, layer, head).map((at) => look(metric, at)).filter((p) => !Number.isNaN(p.value));
}

function partnerPlaces(metric, layer, head) {
  const u = unit(metric);
  if (metric.value.at) return (metric.byHead ??= keptByHead(metric)).get(`${layer},${unitOf(metric, layer, head)}`) ?? [];
  const found = (metric.directed ? ["", "_b"] : [""]).flatMap((end) => {
    const own = { [metric.shape === "cross" ? "layer" + end : "layer"]: layer, [u + end]: unitOf(metric, layer, head) };
    return places(metric, metric.value.dims.filter((dim) => !(dim in own)), own);
  });
  return found.filter((at) => !isSelf(at));
}

function keptByHead(metric) {
  const found = new Map();
  const u = unit(metric);
  for (const at of keptPlaces(metric)) {
    for (const end of metric.directed ? ["", "_b"] : [""]) {
      const key = `${at["layer" + end]},${at[u + end]}`;
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(at);
    }
  }
  return found;
}

/* How strong a pair is: by its size where a metric may be negative, and the stronger the less apart
   the two are where it is a divergence. */
function strength(metric, { value }) {
  return metric.signed ? Math.abs(value) : metric.apart ? -value : value;
}

/* One number for a head: as it is, or its pairs reduced to their mean or to their strongest; worked out
   once. A mean or a strongest has a spread of its own, so the null's sd and the interval do not apply. */
function perHead(metric, layer, head, over) {
  const at = { layer, [unit(metric)]: unitOf(metric, layer, head) };
  if (metric.shape === "map") return look(metric, at);
  metric.reduced ??= new Map();
  const key = `${over},${layer},${at[unit(metric)]}`;
  if (!metric.reduced.has(key)) metric.reduced.set(key, reduced(metric, layer, head, over));
  return { ...NOTHING, at, ...metric.reduced.get(key) };
}

function reduced(metric, layer, head, over) {
  const [values, means] = [[], []];
  const take = (place) => {
    const value = entry(metric, "value", place);
    if (Number.isNaN(value)) return;
    values.push(value);
    means.push(entry(metric, "mean", place));
  };
  if (metric.shape === "matrix") inRow(metric, layer, head, take);
  else partnerPlaces(metric, layer, head).forEach(take);
  const by = (value) => strength(metric, { value });
  const strongest = () => values.reduce((a, b) => (by(b) > by(a) ? b : a));
  return { value: over === "max" && values.length ? strongest() : average(values), mean: average(means) };
}

/* A row of a matrix without a new place for each cell: of large models all rows are read at once. */
function inRow(metric, layer, head, take) {
  const u = unit(metric);
  const place = { layer, [u]: unitOf(metric, layer, head) };
  for (place[u + "_b"] = 0; place[u + "_b"] < size(metric, u); place[u + "_b"] += 1) if (place[u] !== place[u + "_b"]) take(place);
}

function average(numbers) {
  return numbers.length ? numbers.reduce((a, b) => a + b, 0) / numbers.length : NaN;
}

/* A metric as it is; with position taken out where that is wanted and was measured; of a comparison
   the difference, or one of its runs. */
function asWanted(metric, run = state.run) {
  const found = (state.position === "out" && metric?.within) || metric;
  return found?.runs[run] || found;
}

function ofShape(...shapes) {
  return shapes.flatMap((shape) => DATA.metrics.filter((metric) => metric.shape === shape));
}

function metricsOf(...shapes) {
  return ofShape(...shapes).map((metric) => asWanted(metric));
}

function named(name, run) {
  return asWanted(DATA.metrics.find((metric) => metric.name === name), run);
}

function headExists(layer, head) {
  return DATA.kv_of_head.length === 0 || DATA.kv_of_head[layer][head] >= 0;
}

/* A pair in words: with an arrow where one writes what the other reads. */
function pairName(metric, at) {
  return `${placeName(at)} ${metric.directed ? "→" : "–"} ${placeName(at, "_b")}`;
}

/* Names of places, in the field's shorthand: L3H5. */
function placeName(at, end = "") {
  const name = DATA.layers[end && "layer_b" in at ? at.layer_b : at.layer];
  const layer = /^L\d+$/.test(name) ? name : `${name} `;
  if ("kv_head" + end in at) return `${layer}KV${at["kv_head" + end]}`;
  return "head" + end in at ? `${layer}H${DATA.labels.head[at["head" + end]]}` : name;
}

function number(value, digits = 4) {
  if (value === undefined || Number.isNaN(value)) return "–";
  const text = Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-4)
    ? value.toExponential(2)
    : String(Number(value.toPrecision(digits)));
  return text.replace(/-/g, "−");
}

/* Both ends, to the second significant digit of their distance. */
function intervalText({ low, high }) {
  if (!(high >= low)) return "";
  const decimals = high > low ? Math.min(12, Math.max(0, 1 - Math.floor(Math.log10(high - low)))) : 3;
  return `${low.toFixed(decimals)} – ${high.toFixed(decimals)}`.replace(/-/g, "−");
}

/* Mean ± sd, both to the second significant digit of the sd. */
function nullText({ mean, sd }) {
  if (!(sd > 0)) return number(mean);
  const decimals = Math.min(12, Math.max(0, 1 - Math.floor(Math.log10(sd))));
  return `${mean.toFixed(decimals)} ± ${sd.toFixed(decimals)}`.replace("-", "−");
}
