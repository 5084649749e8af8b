/* The panels: each says which choices it depends on, which it offers, and what to draw for them. */

const PANELS = {
  overview: {
    depends: ["map", "over", "scale", "layer", "head"],
    offers: () => ({
      map: options(metricsOf("map", "matrix", "cross")),
      over: ways(named(state.map)),
      scale: named(state.map)?.sd && named(state.map).shape === "map" ? [["value", "value"], ["z", "distance from null, in sd"]] : null,
    }),
    draw() {
      const metric = named(state.map);
      byId("overview-gauge").textContent = metric.shape !== "map" && state.over === "max"
        ? "The null is that of a single pair; the strongest of several lies above it also for unrelated heads." : "";
      return headMap(metric);
    },
    caption: () => headMapCaption(named(state.map)),
    click: ([layer, place]) => choose({ layer, head: headOf(named(state.map), layer, place) }),
  },

  depth: {
    depends: ["profile", "layer", "head"],
    offers: () => ({ profile: options(metricsOf("profile", "map")) }),
    draw() {
      const metric = named(state.profile);
      const u = unit(metric);
      if (!u) {
        const means = DATA.layers.map((_, layer) => look(metric, { layer }));
        return depthFigure({ metric, layers: DATA.layers, means, dots: [], nulls: means });
      }
      const dots = places(metric, ["layer", u]).map((at) => ({ ...look(metric, at), x: at.layer, where: placeName(at) })).filter((d) => !Number.isNaN(d.value));
      const means = DATA.layers.map((_, layer) => {
        const own = dots.filter((d) => d.x === layer);
        return { value: average(own.map((d) => d.value)), mean: average(own.map((d) => d.mean)), sd: average(own.map((d) => d.sd)), low: NaN, high: NaN, z: NaN };
      });
      const ringed = dots.find((d) => d.x === state.layer && d.at[u] === unitOf(metric, state.layer, state.head));
      return depthFigure({ metric, layers: DATA.layers, means, dots, nulls: means, ringed });
    },
    caption: () => `${named(state.profile).title} along the depth of the model.`,
    click: ([, layer]) => choose({ layer }),
  },

  pairs: {
    depends: ["matrix", "layer", "head"],
    offers: () => ({ matrix: options(metricsOf("matrix")) }),
    draw() {
      const metric = named(state.matrix);
      const u = unit(metric);
      const labels = DATA.labels[u].filter((_, i) => u === "kv_head" || headExists(state.layer, i));
      const cells = labels.map((_, i) => labels.map((_, j) => {
        const at = { layer: state.layer, [u]: i, [u + "_b"]: j };
        const found = look(metric, at);
        return { ...found, ...(isSelf(at) ? { value: NaN, z: NaN } : {}), where: `${placeName(at)} – ${placeName(at, "_b")}` };
      }));
      const own = unitOf(metric, state.layer, state.head);
      const title = u === "kv_head" ? "KV head" : "head";
      const figure = grid({ metric, cells, rows: labels, columns: labels, rowTitle: title, columnTitle: `other ${title}` });
      byId("pairs-furthest").replaceChildren(furthest(metric, state.layer));
      figure.layout.shapes = [{ type: "rect", x0: -0.5, x1: labels.length - 0.5, y0: own - 0.5, y1: own + 0.5, line: { color: colour("ink"), width: 2 } }];
      return figure;
    },
    caption: () => `${named(state.matrix).title} between the heads of ${DATA.layers[state.layer]}; the row of the chosen head is framed.`,
    click: ([place]) => choose({ head: headOf(named(state.matrix), state.layer, place) }),
  },

  spectra: {
    depends: ["spectrum", "layer", "head", "axis"],
    offers: () => ({ spectrum: options(metricsOf("spectrum", "layer_spectrum")), axis: [["linear", "linear"], ["log", "logarithmic"]] }),
    draw() {
      const metric = named(state.spectrum);
      const u = unit(metric);
      const along = metric.value.dims.find((dim) => dim !== "layer" && dim !== u);
      const curve = (at) => places(metric, [along], at).map((place) => look(metric, place));
      const own = u ? unitOf(metric, state.layer, state.head) : 0;
      const found = u
        ? range(size(metric, u)).map((i) => ({ at: { layer: state.layer, [u]: i }, strong: i === own }))
        : [{ at: { layer: state.layer }, strong: true }];
      const curves = found
        .map(({ at, strong }) => ({ name: placeName(at), strong, points: curve(at) }))
        .map((c) => ({ ...c, values: c.points.map((p) => p.value) }))
        .filter((c) => c.values.some((v) => !Number.isNaN(v)));
      const nulls = (curves.find((c) => c.strong) || curves[0])?.points || [];
      return curvesFigure({ metric, curves, along: along.replace(/_/g, " "), nulls, log: state.axis === "log" });
    },
    caption: () => `${named(state.spectrum).title} in ${DATA.layers[state.layer]}.`,
  },

  labels: {
    depends: ["labelled", "label", "layer", "head"],
    offers() {
      const metric = named(state.labelled);
      const choice = metric && columnsOf(metric) !== "label";
      return { labelled: options(metricsOf("labelled")), label: choice ? DATA.labels.label.map((name, i) => [String(i), name]) : null };
    },
    draw() {
      const metric = named(state.labelled);
      const along = columnsOf(metric);
      const of = along === "label" ? {} : { label: Number(state.label) };
      const cells = DATA.layers.map((name, layer) => range(size(metric, along)).map((place) => {
        const at = { ...of, layer, [along]: place };
        return { ...look(metric, at), where: `${name} ${DATA.labels[along][place]}` };
      }));
      const ringed = along === unit(metric) ? [state.layer, unitOf(metric, state.layer, state.head)] : null;
      return grid({ metric, cells, rows: DATA.layers, columns: DATA.labels[along], rowTitle: "layer", columnTitle: along.replace("label_b", "other label").replace("kv_head", "KV head").replace(/_/g, " "), upwards: true, ringed });
    },
    caption() {
      const metric = named(state.labelled);
      return columnsOf(metric) === "label" ? `${metric.title}: every label, layer by layer.` : `${metric.title}: ${DATA.labels.label[state.label]}, layer by layer.`;
    },
    click([layer, place]) {
      const metric = named(state.labelled);
      choose(columnsOf(metric) === unit(metric) ? { layer, head: headOf(metric, layer, place) } : { layer });
    },
  },

  across: {
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
  },
};

/* What a metric of labels has besides layers and labels, or else the labels themselves. */
function columnsOf(metric) {
  return metric.value.dims.find((dim) => dim !== "layer" && dim !== "label") || "label";
}

/* Both runs of a comparison and their difference, whatever the other panels show. */
if (DATA.compared) {
  for (const run of ["A", "B", "difference"]) {
    const metric = () => named(state.map, run);
    PANELS[`side-${run}`] = {
      depends: ["map", "over", "scale", "layer", "head"],
      offers: () => ({}),
      possible: () => "A" in DATA.metrics.find(({ name }) => name === state.map).runs,
      draw: () => headMap(metric()),
      caption: () => (run === "difference" ? "" : `${run}. `) + headMapCaption(metric()),
      click: PANELS.overview.click,
    };
  }
}

function headMap(metric) {
  const units = size(metric, unit(metric));
  const cells = DATA.layers.map((_, layer) => range(units).map((place) => {
    const found = perHead(metric, layer, headOf(metric, layer, place), state.over);
    return { ...found, where: placeName({ layer, [unit(metric)]: place }) };
  }));
  return grid({
    metric, cells, show: state.scale, rows: DATA.layers, columns: DATA.labels[unit(metric)], rowTitle: "layer", upwards: true,
    columnTitle: unit(metric) === "kv_head" ? "KV head" : "head", ringed: [state.layer, unitOf(metric, state.layer, state.head)],
  });
}

function headMapCaption(metric) {
  return `${metric.title}: every ${unit(metric) === "kv_head" ? "KV head" : "head"} of every layer` +
    (metric.shape === "map" ? "." : state.over === "max" ? ", its strongest pair." : ", the mean over its pairs.");
}

/* How pairs become one number a head. Of large models only the strongest pairs are at hand. */
function ways(metric) {
  if (!metric || metric.shape === "map") return null;
  const max = ["max", "strongest"];
  return metric.value.at ? [max] : [["mean", "mean over the others"], max];
}

function options(metrics) {
  return metrics.map((metric) => [metric.name, metric.title, metric.group]);
}

function largest(metric, layer, layer_b) {
  metric.largest ??= pairs(metric).reduce((best, pair) => {
    const key = `${pair.at.layer},${pair.at.layer_b}`;
    if (!(best.get(key)?.value >= pair.value)) best.set(key, pair);
    return best;
  }, new Map());
  return metric.largest.get(`${layer},${layer_b}`);
}

const NOTHING = { value: NaN, mean: NaN, sd: NaN, low: NaN, high: NaN, z: NaN };

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
    const at = Number.isNaN(entry(metric.value, forward)) ? backward : forward;
    return { ...look(metric, at), ...(isSelf(at) ? { value: NaN, z: NaN } : {}), where: pairName(metric, at) };
  }));
  return grid({ metric, cells, rows: DATA.layers, columns: DATA.labels[u], rowTitle: "layer", columnTitle: "other head", upwards: true, ringed: [own.layer, own[u]] });
}

/* The pairs of a layer furthest from their null, with what the other metrics say of them. */
function furthest(metric, layer, n = 12) {
  const u = unit(metric);
  const others = metricsOf("matrix").filter((other) => other.name !== metric.name && unit(other) === u);
  const mirrored = (p) => look(metric, { ...p.at, [u]: p.at[u + "_b"], [u + "_b"]: p.at[u] }).value;
  const same = (p) => Math.abs(mirrored(p) - p.value) <= 1e-4 * Math.abs(p.value);
  const once = pairs(metric).filter((p) => p.at.layer === layer && (p.at[u] < p.at[u + "_b"] || !same(p)));
  const distance = (p) => Math.abs(Number.isNaN(p.mean) ? p.value : Number.isNaN(p.z) ? p.value - p.mean : p.z);
  const rows = once.sort((a, b) => distance(b) - distance(a)).slice(0, n).map((p) => [
    element("span", { class: "ends" }, chooser(placeName(p.at), layer, headOf(metric, layer, p.at[u])), " – ", chooser(placeName(p.at, "_b"), layer, headOf(metric, layer, p.at[u + "_b"]))),
    withInterval(p), nullLines(p), p.z, ...others.map((other) => withInterval(look(other, p.at))),
  ]);
  return table(["pair", metric.title, "null ± sd", zNull(), ...others.map((other) => other.title)], rows);
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
