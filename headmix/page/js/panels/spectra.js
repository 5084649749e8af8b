/* Curves: one a head, or one a layer. */

PANELS.spectra = {
  depends: ["spectrum", "layer", "head", "other", "axis"],
  offers: () => ({ spectrum: options(metricsOf("spectrum", "layer_spectrum")), axis: [["linear", "linear"], ["log", "logarithmic"]] }),
  draw() {
    const metric = named(state.spectrum);
    const u = unit(metric);
    const along = metric.value.dims.find((dim) => dim !== "layer" && dim !== u);
    const curve = (at) => places(metric, [along], at).map((place) => look(metric, place));
    const placed = ({ layer, head }) => (u ? { layer, [u]: unitOf(metric, layer, head) } : { layer });
    const chosen = chosenHeads().map((head) => ({ at: placed(head), strong: true, second: head.second }));
    const same = (at) => (one) => one.at.layer === at.layer && one.at[u] === at[u];
    const layer = (u ? places(metric, [u], { layer: state.layer }) : [{ layer: state.layer }])
      .map((at) => chosen.find(same(at)) ?? { at, strong: false });
    const curves = [...layer, ...chosen.filter(({ at }) => at.layer !== state.layer)]
      .map(({ at, ...how }) => ({ name: placeName(at), ...how, points: curve(at) }))
      .map((c) => ({ ...c, values: c.points.map((p) => p.value) }))
      .filter((c) => c.values.some((v) => !Number.isNaN(v)));
    const nulls = (curves.find((c) => c.strong) || curves[0])?.points || [];
    return curvesFigure({ metric, curves, along: along.replace(/_/g, " "), nulls, log: state.axis === "log" });
  },
  caption: () => `${named(state.spectrum).title} in ${DATA.layers[state.layer]}${state.other && state.other.layer !== state.layer ? `, and of ${placeName(state.other)}` : ""}.`,
};
