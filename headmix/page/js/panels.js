/* The panels: each says which choices it depends on, which it offers, and what to draw for them. One
   file a panel, in panels/. */

const PANELS = {};

function options(metrics) {
  return metrics.map((metric) => [metric.name, metric.title, metric.group]);
}

const NOTHING = { value: NaN, mean: NaN, sd: NaN, low: NaN, high: NaN, z: NaN };
