/* Pairs of heads in one layer, as a matrix. */

PANELS.pairs = {
  depends: ["matrix", "order", "layer", "head", "other"],
  offers: () => ({
    matrix: options(metricsOf("matrix")),
    order: named(state.matrix)?.order ? [["number", "by number"], ["likeness", "by clustering"]] : null,
  }),
  draw() {
    const metric = named(state.matrix);
    const u = unit(metric);
    const shown = inOrder(metric, state.layer);
    const labels = shown.map((place) => DATA.labels[u][place]);
    const cells = shown.map((i) => shown.map((j) => {
      const at = { layer: state.layer, [u]: i, [u + "_b"]: j };
      const found = look(metric, at);
      return { ...found, ...(isSelf(at) ? { value: NaN, z: NaN } : {}), where: `${placeName(at)} – ${placeName(at, "_b")}` };
    }));
    const title = unitsOf(metric, 1);
    const figure = grid({ metric, cells, rows: labels, columns: labels, rowTitle: title, columnTitle: `other ${title}` });
    figure.layout.shapes = pairFrames(metric, shown);
    return figure;
  },
  caption: () => `${named(state.matrix).title} between the ${unitsOf(named(state.matrix))} of ${DATA.layers[state.layer]}${state.order === "likeness" ? ", those that are alike in it next to each other" : ""}; the row of the chosen head is framed${inLayer(state.other) ? ", and dotted the chosen pair" : ""}.`,
  click([row, column]) {
    const metric = named(state.matrix);
    const [head, other] = [row, column].map((place) => headOf(metric, state.layer, inOrder(metric, state.layer)[place]));
    choose({ layer: state.layer, head, other: { layer: state.layer, head: other } });
  },
};

/* The heads of a layer as the matrix has them: counted, or those next to each other that are alike. */
function inOrder(metric, layer) {
  const u = unit(metric);
  const all = state.order === "likeness" && metric.order ? metric.order[layer] : range(size(metric, u));
  return all.filter((place) => placeExists(metric, layer, place));
}

function inLayer(head) {
  return head && head.layer === state.layer;
}

/* The row of the chosen head, and both cells of the chosen pair. */
function pairFrames(metric, shown) {
  const [own, other] = chosenHeads().filter(inLayer).map(({ layer, head }) => shown.indexOf(unitOf(metric, layer, head)));
  const row = frame(own, own, 0, shown.length - 1);
  return other === undefined ? [row] : [row, frame(own, own, other, other, true), frame(other, other, own, own, true)];
}
