/* One metric through all runs of a sequence: a line a layer, and the chosen head. */

if (DATA.labels.run) {
  PANELS.sequence = {
    run: "every",
    position: () => (positions() ? state.position : "in"),
    depends: ["followed", "layers", "layer", "head", "other"],
    offers: () => ({ followed: options(ofShape("profile", "map", "matrix").filter((metric) => metric.sequence)) }),
    draw() {
      const metric = followed();
      const runs = DATA.labels.run ?? [];
      const u = unit(metric);
      const head = ({ layer, head }) => runs.map((_, run) => entry(metric, "sequence", { run, layer, ...(u && { [u]: unitOf(metric, layer, head) }) }));
      const mean = (layer) => runs.map((_, run) => average(u ? places(metric, [u], { run, layer }).map((at) => entry(metric, "sequence", at)).filter((v) => !Number.isNaN(v)) : [entry(metric, "sequence", { run, layer })]));
      const lines = [
        ...shownLayers().map((layer) => ({ name: u ? `${DATA.layers[layer]}, mean over heads` : DATA.layers[layer], values: mean(layer), strong: layer === state.layer })),
        ...(u ? chosenHeads().map((chosen) => ({ name: placeName(chosen), values: head(chosen), chosen: true, second: chosen.second })) : []),
      ];
      return sequenceFigure(metric, runs, lines, nullAtFirst(metric));
    },
    caption: () => `${followedTitle(followed())} in every run, one after the other${state.position === "out" && !positions() ? "; position as it is" : ""}.`,
  };
}

/* Whether the chosen metric was followed with position taken out too. */
function positions() {
  return Boolean(DATA.metrics.find(({ name }) => name === state.followed).within?.sequence);
}

/* The chosen metric through all runs, with position taken out where that is wanted and there is. */
function followed() {
  const metric = DATA.metrics.find(({ name }) => name === state.followed);
  return state.position === "out" && positions() ? metric.within : metric;
}

/* These are the runs' own values, not what changed. */
function followedTitle(metric) {
  return metric.title.replace(/, B − A$/, "");
}

/* The null that the chosen head or layer had in the first run. */
function nullAtFirst(metric) {
  const was = metric.runs.A;
  const found = was && perHead(was, state.layer, state.head, "mean");
  return (was?.shape === "profile" ? look(was, { layer: state.layer }) : found)?.mean ?? NaN;
}

function sequenceFigure(metric, runs, lines, mean) {
  const x = range(runs.length);
  const colours = ({ chosen }) => colour(chosen ? "warm" : "accent");
  const traces = lines.map((line) => ({
    type: "scatter", mode: "lines+markers", name: plain(line.name), showlegend: Boolean(line.strong || line.chosen), x, y: line.values,
    line: { color: colours(line), width: line.strong || line.chosen ? 2.5 : 1, dash: line.second ? "dot" : "solid" }, marker: { size: line.strong || line.chosen ? 6 : 3 },
    opacity: line.strong || line.chosen ? 1 : 0.45, text: runs.map((run) => `${plain(line.name)} · ${plain(run)}`), hovertemplate: "%{text}<br>%{y:.4g}<extra></extra>",
  }));
  return {
    metrics: [{ ...metric, title: followedTitle(metric) }],
    traces: [...nullBand(x, x.map(() => ({ mean, sd: NaN }))), ...traces],
    layout: layout(340, {
      showlegend: true, margin: { l: 56, r: 12, t: 30, b: 44 },
      xaxis: axis("run", runs, { range: [-0.3, runs.length - 0.7], showgrid: false }), yaxis: axis(followedTitle(metric)),
    }),
    table: () => table(["run", ...lines.map((line) => line.name)], x.map((run) => [runs[run], ...lines.map((line) => line.values[run])])),
    rows: () => ({ columns: ["run", "line", metric.variable], rows: lines.flatMap((line) => x.map((run) => [runs[run], line.name, Number.isFinite(line.values[run]) ? line.values[run] : null])) }),
  };
}
