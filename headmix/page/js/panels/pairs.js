/* Pairs of heads in one layer. */

PANELS.pairs = {
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
};

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
