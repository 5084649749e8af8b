/* The map of one metric over all heads, and both runs of a comparison beside each other. */

PANELS.overview = {
  depends: ["map", "over", "scale", "layers", "layer", "head", "other"],
  offers: () => ({
    map: options(metricsOf("map", "matrix", "cross")),
    over: ways(named(state.map)),
    scale: named(state.map)?.sd && named(state.map).shape === "map" ? [["value", "value"], ["z", "distance from null, in sd"]] : null,
  }),
  draw() {
    const metric = named(state.map);
    byId("overview-gauge").textContent = metric.shape !== "map" && state.over === "max"
      ? `The null is that of a single pair; the ${strongestOf(metric)} of several lies ${metric.signed ? "further from" : metric.apart ? "below" : "above"} it also for unrelated heads.` : "";
    return headMap(metric);
  },
  caption: () => headMapCaption(named(state.map)),
  click([row, place]) {
    const layer = shownLayers()[row];
    choose({ layer, head: headOf(named(state.map), layer, place) });
  },
};

/* Both runs of a comparison and their difference, whatever the other panels show. */
if (DATA.compared) {
  for (const run of ["A", "B", "difference"]) {
    const metric = () => named(state.map, run);
    PANELS[`side-${run}`] = {
      run,
      depends: ["map", "over", "scale", "layers", "layer", "head", "other"],
      offers: () => ({}),
      possible: () => "A" in (DATA.metrics.find(({ name }) => name === state.map)?.runs ?? {}),
      draw: () => headMap(metric()),
      caption: () => (run === "difference" ? "" : `${run}. `) + headMapCaption(metric()),
      click: PANELS.overview.click,
    };
  }
}

function headMap(metric) {
  const units = size(metric, unit(metric));
  const layers = shownLayers();
  const cells = layers.map((layer) => range(units).map((place) => {
    const found = placeExists(metric, layer, place) ? perHead(metric, layer, headOf(metric, layer, place), state.over) : { ...NOTHING, at: {} };
    return { ...found, where: placeName({ layer, [unit(metric)]: place }) };
  }));
  return grid({
    metric, cells, show: state.scale, rows: layerNames(layers), columns: DATA.labels[unit(metric)], rowTitle: "layer", upwards: true,
    columnTitle: unitsOf(metric, 1), ringed: marks(metric, layers),
  });
}

function headMapCaption(metric) {
  return `${metric.title}: every ${unitsOf(metric, 1)} of every layer${state.layers ? " shown" : ""}` +
    (metric.shape === "map" ? "." : state.over === "max" ? `, its ${strongestOf(metric)} pair.` : ", the mean over its pairs.");
}

/* What the strongest of pairs is called: of a divergence it is the least. */
function strongestOf(metric) {
  return metric.apart && !metric.signed ? "closest" : "strongest";
}

/* How pairs become one number a head. Of large models only the strongest pairs are at hand. */
function ways(metric) {
  if (!metric || metric.shape === "map") return null;
  const max = ["max", strongestOf(metric)];
  return metric.value.at ? [max] : [["mean", "mean over the others"], max];
}
