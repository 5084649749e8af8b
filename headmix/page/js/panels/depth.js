/* One metric along the depth of the model. */

PANELS.depth = {
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
};
