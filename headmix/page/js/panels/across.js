/* Pairs of heads of any two layers. */

PANELS.across = {
  depends: ["cross", "ends", "layer", "head"],
  offers: () => ({ cross: options(metricsOf("cross")), ends: [["layers", "strongest of each two layers"], ["head", "all partners of the chosen head"]] }),
  draw() {
    const metric = named(state.cross);
    byId("across-strongest").replaceChildren(strongest(metric));
    return state.ends === "head" ? partnersFigure(metric) : layersFigure(metric);
  },
  caption: () => (state.ends === "head"
    ? `${named(state.cross).title} of ${placeName({ layer: state.layer, head: state.head })} with every other head${named(state.cross).directed ? ": written by it where the other layer is later, read by it where earlier" : ""}.`
    : `${named(state.cross).title}: the strongest pair between each two layers.`) +
    (named(state.cross).value.at ? " Of so many pairs the page holds only the strongest; all are in the results file." : ""),
  click([row, column]) {
    if (state.ends === "head") return choose({ layer: row, head: headOf(named(state.cross), row, column) });
    const best = largest(named(state.cross), row, column);
    return best && choose({ layer: best.at.layer, head: headOf(named(state.cross), best.at.layer, best.at[unit(named(state.cross))]) });
  },
};

function largest(metric, layer, layer_b) {
  metric.largest ??= pairs(metric).reduce((best, pair) => {
    const key = `${pair.at.layer},${pair.at.layer_b}`;
    if (!(best.get(key)?.value >= pair.value)) best.set(key, pair);
    return best;
  }, new Map());
  return metric.largest.get(`${layer},${layer_b}`);
}

function layersFigure(metric) {
  const cells = DATA.layers.map((_, i) => DATA.layers.map((_, j) => {
    const best = largest(metric, i, j);
    return best ? { ...best, where: pairName(metric, best.at) } : { ...NOTHING, where: "" };
  }));
  return grid({ metric, cells, rows: DATA.layers, columns: DATA.layers, ...(metric.directed ? { rowTitle: "written in layer", columnTitle: "read in layer" } : { rowTitle: "layer", columnTitle: "other layer" }) });
}

function partnersFigure(metric) {
  const u = unit(metric);
  const own = { layer: state.layer, [u]: unitOf(metric, state.layer, state.head) };
  const cells = DATA.layers.map((_, layer) => range(size(metric, u)).map((place) => {
    const forward = { ...own, layer_b: layer, [u + "_b"]: place };
    const backward = { layer, [u]: place, layer_b: own.layer, [u + "_b"]: own[u] };
    const at = Number.isNaN(entry(metric, "value", forward)) ? backward : forward;
    return { ...look(metric, at), ...(isSelf(at) ? { value: NaN, z: NaN } : {}), where: pairName(metric, at) };
  }));
  return grid({ metric, cells, rows: DATA.layers, columns: DATA.labels[u], rowTitle: "layer", columnTitle: "other head", upwards: true, ringed: [own.layer, own[u]] });
}

function strongest(metric, n = 12) {
  const u = unit(metric);
  const once = pairs(metric).filter(({ at }) => metric.directed || at.layer < at.layer_b || (at.layer === at.layer_b && at[u] < at[u + "_b"]));
  const rows = once.sort((a, b) => b.value - a.value).slice(0, n).map((p) => [
    chooser(placeName(p.at), p.at.layer, headOf(metric, p.at.layer, p.at[u])),
    chooser(placeName(p.at, "_b"), p.at.layer_b, headOf(metric, p.at.layer_b, p.at[u + "_b"])),
    p.value, nullText(p), p.z,
  ]);
  return table([...(metric.directed ? ["written by", "read by"] : ["head", "other head"]), metric.title, "null ± sd", zNull()], rows);
}
