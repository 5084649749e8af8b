/* One metric along the depth of the model. */

PANELS.depth = {
  depends: ["profile", "layers", "layer", "head", "other"],
  offers: () => ({ profile: options(metricsOf("profile", "map")) }),
  draw() {
    const metric = named(state.profile);
    const layers = shownLayers();
    const u = unit(metric);
    if (!u) {
      const means = layers.map((layer) => look(metric, { layer }));
      return depthFigure({ metric, layers: layerNames(layers), means, dots: [], nulls: means });
    }
    const dots = layers.flatMap((layer, x) => places(metric, [u], { layer }).map((at) => ({ ...look(metric, at), x, where: placeName(at) }))).filter((d) => !Number.isNaN(d.value));
    const means = layers.map((_, x) => {
      const own = dots.filter((d) => d.x === x);
      return { ...NOTHING, value: average(own.map((d) => d.value)), mean: average(own.map((d) => d.mean)), sd: average(own.map((d) => d.sd)) };
    });
    const ringed = marks(metric, layers).map(({ row, column, second }) => ({ ...dots.find((d) => d.x === row && d.at[u] === column), second })).filter((d) => "value" in d);
    return depthFigure({ metric, layers: layerNames(layers), means, dots, nulls: means, ringed });
  },
  caption: () => `${named(state.profile).title} along the depth of the model.`,
  click([, x], point) {
    const layer = shownLayers()[x];
    const { at } = point.customdata ?? {};
    choose(at ? { layer, head: headOf(named(state.profile), layer, at[unit(named(state.profile))]) } : { layer });
  },
};
