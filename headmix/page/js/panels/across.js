/* Pairs of heads of any two layers. */

PANELS.across = {
  depends: ["cross", "ends", "layers", "layer", "head", "other"],
  offers: () => ({ cross: options(metricsOf("cross")), ends: [["layers", "strongest of each two layers"], ["head", "all partners of the chosen head"]] }),
  draw() {
    const metric = named(state.cross);
    refill("across-strongest", strongest(metric));
    return state.ends === "head" ? partnersFigure(metric) : layersFigure(metric);
  },
  caption: () => (state.ends === "head"
    ? `${named(state.cross).title} of ${placeName({ layer: state.layer, head: state.head })} with every other head${named(state.cross).directed ? ": written by it where the other layer is later, read by it where earlier" : ""}.`
    : `${named(state.cross).title}: the strongest pair between each two layers.`) +
    (named(state.cross).value.at ? " Of so many pairs the page holds only the strongest; all are in the results file." : ""),
  click([row, column]) {
    const metric = named(state.cross);
    const layers = shownLayers();
    if (state.ends === "head") return choose({ layer: state.layer, head: state.head, other: { layer: layers[row], head: headOf(metric, layers[row], column) } });
    const best = largest(metric, layers[row], layers[column]);
    return best && choosePair(metric, best.at);
  },
};

/* The pair at a place of an array, as the chosen one. */
function choosePair(metric, at) {
  const [one, other] = endsOf(metric, at);
  choose({ ...one, other });
}

function endsOf(metric, at) {
  return ["", "_b"].map((end) => {
    const layer = at["layer" + end] ?? at.layer;
    return { layer, head: headOf(metric, layer, at[unit(metric) + end]) };
  });
}

/* Whether the pair at a place is the chosen one, whichever head comes first. Two heads of one KV group
   are no pair of groups. */
function isChosenPair(metric, at) {
  if (!state.other) return false;
  const key = ({ layer, head }) => `${layer},${unitOf(metric, layer, head)}`;
  const chosen = chosenHeads().map(key);
  const ends = endsOf(metric, at).map(key);
  return chosen.every((end) => ends.includes(end)) && ends.every((end) => chosen.includes(end));
}

function largest(metric, layer, layer_b) {
  metric.largest ??= pairs(metric).reduce((best, pair) => {
    const key = `${pair.at.layer},${pair.at.layer_b}`;
    if (!best.has(key) || strength(metric, pair) > strength(metric, best.get(key))) best.set(key, pair);
    return best;
  }, new Map());
  return metric.largest.get(`${layer},${layer_b}`);
}

function layersFigure(metric) {
  const layers = shownLayers();
  const cells = layers.map((i) => layers.map((j) => {
    const best = largest(metric, i, j);
    return best ? { ...best, where: pairName(metric, best.at) } : { ...NOTHING, where: "" };
  }));
  const ringed = layers.flatMap((i, row) => layers.map((j, column) => ({ row, column, at: largest(metric, i, j)?.at }))).filter(({ at }) => at && isChosenPair(metric, at));
  const names = layerNames(layers);
  return grid({ metric, cells, rows: names, columns: names, ringed, ...(metric.directed ? { rowTitle: "written in layer", columnTitle: "read in layer" } : { rowTitle: "layer", columnTitle: "other layer" }) });
}

function partnersFigure(metric) {
  const u = unit(metric);
  const own = { layer: state.layer, [u]: unitOf(metric, state.layer, state.head) };
  const layers = shownLayers();
  const cells = layers.map((layer) => range(size(metric, u)).map((place) => {
    const forward = { ...own, layer_b: layer, [u + "_b"]: place };
    const backward = { layer, [u]: place, layer_b: own.layer, [u + "_b"]: own[u] };
    const at = Number.isNaN(entry(metric, "value", forward)) ? backward : forward;
    return { ...look(metric, at), ...(isSelf(at) ? { value: NaN, z: NaN } : {}), where: pairName(metric, at) };
  }));
  return grid({ metric, cells, rows: layerNames(layers), columns: DATA.labels[u], rowTitle: "layer", columnTitle: "other head", upwards: true, ringed: marks(metric, layers) });
}

function strongest(metric, n = 12) {
  const u = unit(metric);
  const layers = new Set(shownLayers());
  const once = pairs(metric).filter(({ at }) => layers.has(at.layer) && layers.has(at.layer_b)).filter(({ at }) => metric.directed || at.layer < at.layer_b || (at.layer === at.layer_b && at[u] < at[u + "_b"]));
  const found = once.sort((a, b) => strength(metric, b) - strength(metric, a)).slice(0, n);
  const rows = found.map((p) => [
    chooser(placeName(p.at), p.at.layer, headOf(metric, p.at.layer, p.at[u])),
    element("span", { class: "ends" }, chooser(placeName(p.at, "_b"), p.at.layer_b, headOf(metric, p.at.layer_b, p.at[u + "_b"])), " ", pairChooser(...endsOf(metric, p.at))),
    p.value, nullText(p), p.z,
  ]);
  const made = table([...(metric.directed ? ["written by", "read by"] : ["head", "other head"]), metric.title, "null ± sd", zNull()], rows);
  found.forEach((p, i) => { if (isChosenPair(metric, p.at)) made.tBodies[0].rows[i].setAttribute("aria-current", "true"); });
  return made;
}
