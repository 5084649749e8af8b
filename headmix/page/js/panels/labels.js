/* What is measured of labels. */

PANELS.labels = {
  depends: ["labelled", "label", "layers", "layer", "head", "other"],
  offers: () => ({
    labelled: options(metricsOf("labelled")),
    label: DATA.labels.label?.map((name, i) => [String(i), name]) ?? null,
  }),
  draw() {
    const metric = named(state.labelled);
    const along = columnsOf(metric);
    const layers = shownLayers();
    const of = along === "label" ? {} : { label: Number(state.label) };
    const cells = layers.map((layer) => range(size(metric, along)).map((place) => {
      const at = { ...of, layer, [along]: place };
      return { ...look(metric, at), where: `${DATA.layers[layer]} ${DATA.labels[along][place]}` };
    }));
    refill("labels-of", labelTable(layers));
    return grid({
      metric, cells, rows: layerNames(layers), columns: DATA.labels[along], rowTitle: "layer", upwards: true,
      columnTitle: along.replace("label_b", "other label").replace("kv_head", "KV head").replace(/_/g, " "),
      ringed: along === unit(metric) ? marks(metric, layers) : [],
    });
  },
  caption() {
    const metric = named(state.labelled);
    return columnsOf(metric) === "label" ? `${metric.title}: every label, layer by layer.` : `${metric.title}: ${DATA.labels.label[state.label]}, layer by layer.`;
  },
  click([row, place]) {
    const metric = named(state.labelled);
    const layer = shownLayers()[row];
    if (columnsOf(metric) === unit(metric)) choose({ layer, head: headOf(metric, layer, place) });
    else choose(columnsOf(metric) === "label" ? { layer, label: String(place) } : { layer });
  },
};

/* What a metric of labels has besides layers and labels, or else the labels themselves. */
function columnsOf(metric) {
  return metric.value.dims.find((dim) => dim !== "layer" && dim !== "label") || "label";
}

/* The chosen label in one line a layer: what there is one number of, as how many heads take part,
   and of what there is a number a head, the head with most. */
function labelTable(layers) {
  const all = metricsOf("labelled");
  const single = all.filter((metric) => columnsOf(metric) === "label");
  const byHead = all.filter((metric) => unit(metric) && columnsOf(metric) === unit(metric));
  if (!single.length && !byHead.length) return "";
  const label = Number(state.label);
  const rows = layers.map((layer) => [
    DATA.layers[layer],
    ...single.map((metric) => nextToNull(look(metric, { layer, label }))),
    ...byHead.map((metric) => mostOf(metric, layer, label)),
  ]);
  const heads = [...single.map(({ title }) => title), ...byHead.map(({ title }) => `${title}: most`)];
  return element("div", {}, element("h3", {}, DATA.labels.label[label]), table(["layer", ...heads], rows));
}

function nextToNull(found) {
  const expected = Number.isNaN(found.mean) ? [] : [element("small", {}, `null ${nullText(found)}`)];
  return element("span", { class: "n" }, number(found.value, 3), ...expected);
}

function mostOf(metric, layer, label) {
  const u = unit(metric);
  const found = places(metric, [u], { layer, label }).map((at) => look(metric, at)).filter((p) => !Number.isNaN(p.value));
  if (!found.length) return "–";
  const most = found.reduce((a, b) => (b.value > a.value ? b : a));
  return element("span", { class: "n" }, chooser(placeName(most.at), layer, headOf(metric, layer, most.at[u])), ` ${number(most.value, 3)}`);
}
