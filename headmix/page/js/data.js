"use strict";

/* The numbers: arrays with named axes, looked up by place. */

const DATA = JSON.parse(document.getElementById("data").textContent);

function decode(array) {
  if (!array || array.words) return array;
  const buffer = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
  array.numbers = new Float32Array(buffer(array.numbers));
  if (array.at) array.at = new Map([...new Uint32Array(buffer(array.at))].map((flat, i) => [flat, i]));
  return array;
}

/* A metric and its other versions: with position taken out, and as each of two compared runs had it. */
function versions(metric) {
  return metric ? [metric, ...versions(metric.within), ...Object.values(metric.runs)] : [];
}

for (const metric of DATA.metrics.flatMap(versions)) {
  for (const part of ["value", "mean", "sd", "low", "high"]) metric[part] = decode(metric[part]);
}

/* One entry of an array: `at` gives the index along each axis, and may name axes it lacks. Arrays
   with an `at` of their own hold only some places. */
function entry(array, at) {
  let flat = 0;
  array.dims.forEach((dim, i) => { flat = flat * array.shape[i] + at[dim]; });
  if (array.at) return array.numbers[array.at.get(flat)] ?? NaN;
  return (array.words || array.numbers)[flat];
}

/* Value, null mean and sd, interval, and distance from the null at one place; NaN where there is
   none. */
function look(metric, at) {
  const [value, mean, sd, low, high] = [metric.value, metric.mean, metric.sd, metric.low, metric.high].map((part) => (part ? entry(part, at) : NaN));
  return { at, value, mean, sd, low, high, z: sd > 0 ? (value - mean) / sd : NaN };
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

/* The head that a place along that axis stands for: the first of its KV group. */
function headOf(metric, layer, place) {
  return unit(metric) === "kv_head" ? Math.max(0, DATA.kv_of_head[layer].indexOf(place)) : place;
}

function isSelf(at) {
  return ["head", "kv_head"].some((u) => u + "_b" in at && at[u] === at[u + "_b"] && !("layer_b" in at && at.layer !== at.layer_b));
}

/* Every pair that was measured, a head with itself aside; worked out once. */
function pairs(metric) {
  metric.pairs ??= pairPlaces(metric).filter((at) => !isSelf(at)).map((at) => look(metric, at)).filter((p) => !Number.isNaN(p.value));
  return metric.pairs;
}

function pairPlaces({ value }) {
  if (!value.at) return places({ value }, value.dims);
  return [...value.at.keys()].map((flat) => {
    const at = {};
    for (let i = value.dims.length - 1; i >= 0; i -= 1) {
      at[value.dims[i]] = flat % value.shape[i];
      flat = Math.floor(flat / value.shape[i]);
    }
    return at;
  });
}

/* The pairs that one head takes part in: as the first, and as either where it matters which. */
function partners(metric, layer, head) {
  metric.byHead ??= groupByHead(metric);
  return metric.byHead.get(`${layer},${unitOf(metric, layer, head)}`) || [];
}

function groupByHead(metric) {
  const found = new Map();
  const u = unit(metric);
  for (const pair of pairs(metric)) {
    for (const end of metric.directed ? ["", "_b"] : [""]) {
      const key = `${pair.at["layer" + end]},${pair.at[u + end]}`;
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(pair);
    }
  }
  return found;
}

/* One number for a head: as it is, or its pairs reduced to their mean or to their largest.
   A mean or a largest has a spread of its own, so the null's sd and the interval do not apply. */
function perHead(metric, layer, head, over) {
  if (metric.shape === "map") return look(metric, { layer, [unit(metric)]: unitOf(metric, layer, head) });
  const own = partners(metric, layer, head);
  const mean = average(own.map((p) => p.mean));
  const values = own.map((p) => p.value);
  const value = over === "max" && own.length ? Math.max(...values) : average(values);
  return { ...NOTHING, at: { layer, [unit(metric)]: unitOf(metric, layer, head) }, value, mean };
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
  return text.replace("-", "−");
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
