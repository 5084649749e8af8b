/* Curves: one a head, or one a layer. */

PANELS.spectra = {
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
};
