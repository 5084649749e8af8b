/* What is measured of labels. */

PANELS.labels = {
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
};

/* What a metric of labels has besides layers and labels, or else the labels themselves. */
function columnsOf(metric) {
  return metric.value.dims.find((dim) => dim !== "layer" && dim !== "label") || "label";
}
