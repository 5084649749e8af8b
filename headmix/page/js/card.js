/* The head card: everything known of one head. */

function drawCard() {
  const { layer, head } = state;
  byId("card-name").textContent = placeName({ layer, head });
  const body = byId("card-body");
  if (!DATA.valid[layer]) {
    body.replaceChildren(element("p", { class: "notice" }, "This layer is invalid; see “Left out”."));
    return;
  }
  body.replaceChildren(...[group(layer, head), numbers(layer, head), ...neighbours(layer, head), ...words(layer, head)].filter(Boolean));
}

function group(layer, head) {
  const kv = DATA.kv_of_head[layer];
  if (!kv) return null;
  const shared = range(kv.length).filter((h) => kv[h] === kv[head] && h !== head && kv[h] >= 0);
  if (!shared.length) return null;
  return element("p", { class: "small" }, `Shares KV head ${kv[head]} with `, ...joined(shared.map((h) => chooser(`H${DATA.labels.head[h]}`, layer, h))), ".");
}

function numbers(layer, head) {
  const rows = metricsOf("map").map((metric) => {
    const found = perHead(metric, layer, head);
    return [metric.title, found.value, nullText(found), distance(found)];
  });
  const pairs = metricsOf("matrix").map((metric) => {
    const found = perHead(metric, layer, head, "mean");
    return [`${metric.title}, mean over the others`, found.value, nullText(found), distance(found)];
  });
  const all = [...rows, ...pairs];
  return all.length ? table(["", "value", "null ± sd", "z_null"], all) : null;
}

/* The distance from the null as a number with a bar, which stops at ± 6. */
function distance({ z }) {
  if (Number.isNaN(z)) return "–";
  const side = z < 0 ? "low" : "high";
  return element("span", { class: "distance" }, number(z, 2), element("meter", { class: side, min: 0, max: 6, value: Math.min(6, Math.abs(z)), "aria-hidden": "true" }));
}

function neighbours(layer, head, n = 3) {
  return metricsOf("matrix", "cross").flatMap((metric) => {
    const size = (p) => (metric.signed ? Math.abs(p.value) : p.value);
    const all = partners(metric, layer, head).sort((a, b) => size(b) - size(a));
    const ways = metric.shape === "matrix"
      ? [[`Nearest by ${lower(metric.title)}`, all, "_b"]]
      : [[`${metric.title}: reads from`, all.filter((p) => isOwn(metric, p.at, layer, head, "_b")), ""],
         [`${metric.title}: read by`, all.filter((p) => isOwn(metric, p.at, layer, head, "")), "_b"]];
    return ways.filter(([, found]) => found.length).map(([title, found, end]) => element("section", {}, element("h3", {}, title), partnerTable(metric, found.slice(0, n), end)));
  });
}

function isOwn(metric, at, layer, head, end) {
  return at["layer" + end] === layer && at[unit(metric) + end] === unitOf(metric, layer, head);
}

function partnerTable(metric, found, end) {
  const rows = found.map((p) => {
    const layer = end && "layer_b" in p.at ? p.at.layer_b : p.at.layer;
    return [chooser(placeName(p.at, end), layer, headOf(metric, layer, p.at[unit(metric) + end])), p.value, nullText(p), distance(p)];
  });
  return table(["", "value", "null ± sd", "z_null"], rows);
}

function words(layer, head) {
  return metricsOf("text").filter((metric) => unit(metric) && metric.value.dims.includes("layer")).map((metric) => {
    const u = unit(metric);
    const rest = metric.value.dims.filter((dim) => dim !== "layer" && dim !== u);
    const last = rest.pop();
    const at = { layer, [u]: unitOf(metric, layer, head) };
    const rows = places(metric, rest, at).map((place) => {
      const tokens = (last ? places(metric, [last], place) : [place]).map((p) => entry(metric.value, p));
      return [rest.map((dim) => label(dim, place[dim])).join(" "), token(tokens)];
    }).filter(([, tokens]) => tokens.childElementCount);
    return rows.length ? element("section", {}, element("h3", {}, metric.title), table([rest.map((dim) => dim.replace(/_/g, " ")).join(", ") || " ", last ? last.replace(/_/g, " ") : " "], rows)) : null;
  });
}

function label(dim, place) {
  const text = DATA.labels[dim][place];
  return /^\d+$/.test(text) ? String(Number(text) + 1) : text;
}

function token(tokens) {
  return element("span", { class: "tokens" }, ...tokens.filter((t) => t !== "").map((t) => element("bdi", {}, t.replace(/\s/g, "␣"))));
}

function joined(parts) {
  return parts.flatMap((part, i) => (i ? [", ", part] : [part]));
}

function lower(text) {
  return /^[A-Z][a-z]/.test(text) ? text[0].toLowerCase() + text.slice(1) : text;
}
