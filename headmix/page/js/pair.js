/* The chosen pair, in the card: every metric of these two heads, side by side. */

function pairSection({ layer, head, other }) {
  const ends = [{ layer, head }, other];
  const rows = Object.entries(GROUPS).flatMap(([group, title]) => {
    const found = metricsOf("matrix", "cross").filter((metric) => metric.group === group).flatMap((metric) => pairRows(metric, ...ends));
    return found.length ? [[element("i", {}, lower(title)), "", "", ""], ...found] : [];
  });
  const alone = metricsOf("map").filter((metric) => metric.replaced).flatMap((metric) => ends.map((end) => [`${metric.title}: ${placeName(end)}`, look(metric, placeIn(metric, end))]))
    .filter(([, found]) => !Number.isNaN(found.value)).map(([title, found]) => [title, ...numbersOf(found)]);
  if (alone.length) rows.push([element("i", {}, "each alone"), "", "", ""], ...alone);
  const name = ends.map((end) => placeName(end)).join(" – ");
  return element("section", { class: "pair", "aria-label": `The pair ${name}` },
    element("h3", {}, name, " ",
      element("button", { type: "button", "data-focus": "swap", onclick: () => choose({ ...other, other: ends[0] }) }, "Swap"), " ",
      element("button", { type: "button", "data-focus": "drop", onclick: () => choose({ layer, head }) }, "Drop pair")),
    rows.length ? classed("readings", table(HEAD(), rows)) : element("p", {}, "Nothing was measured of this pair."));
}

/* Where a head is along the axes of a metric; `end` is "_b" for the second of a pair. */
function placeIn(metric, { layer, head }, end = "") {
  return { ["layer" + end]: layer, [unit(metric) + end]: unitOf(metric, layer, head) };
}

/* One line, or two where it matters which head comes first. */
function pairRows(metric, a, b) {
  if (metric.shape === "matrix" && a.layer !== b.layer) return [];
  const [there, back] = [[a, b], [b, a]].map(([p, q]) => look(metric, { ...placeIn(metric, p), ...onlyUnit(metric, placeIn(metric, q, "_b")) }));
  const found = [there, back].filter((pair) => !Number.isNaN(pair.value) && !isSelf(pair.at));
  const same = found.length === 2 && Math.abs(there.value - back.value) <= 1e-4 * Math.abs(there.value);
  const title = (pair) => (metric.directed || !same ? `${metric.title}: ${pairName(metric, pair.at)}` : metric.title);
  return (same ? [there] : found).map((pair) => [title(pair), ...numbersOf(pair)]);
}

/* Within one layer there is no second axis of layers. */
function onlyUnit(metric, { layer_b, ...rest }) {
  return metric.shape === "cross" ? { layer_b, ...rest } : rest;
}
