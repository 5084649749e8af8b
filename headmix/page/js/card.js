/* The head card: everything known of one head, and of the chosen pair. */

function drawCard() {
  const { layer, head } = state;
  byId("card-name").textContent = placeName({ layer, head });
  if (!DATA.valid[layer]) return refill("card-body", element("p", { class: "notice" }, "This layer is invalid; see “Left out”."));
  refill("card-body", ...[state.other && pairSection(state), group(layer, head), ...numbers(layer, head), ...nearest(layer, head), ...words(layer, head), ...composed(layer, head)].filter(Boolean));
}

function group(layer, head) {
  const kv = DATA.kv_of_head[layer];
  if (!kv) return null;
  const shared = range(kv.length).filter((h) => kv[h] === kv[head] && h !== head && kv[h] >= 0);
  if (!shared.length) return null;
  return element("p", { class: "small" }, `Shares KV head ${kv[head]} with `, ...joined(shared.map((h) => chooser(`H${DATA.labels.head[h]}`, layer, h))), ".");
}

/* The head's own numbers and the means over its pairs, those from the weights apart. */
function numbers(layer, head) {
  return Object.entries(GROUPS).map(([group, title]) => {
    const rows = (...shapes) => metricsOf(...shapes).filter((metric) => metric.group === group)
      .map((metric) => [metric, perHead(metric, layer, head, "mean")]).filter(([, found]) => !Number.isNaN(found.value))
      .map(([metric, found]) => [metric.title, ...numbersOf(found)]);
    const [own, shared] = [[...rows("map"), ...labelledRows(group, layer, head)], rows("matrix")];
    if (!own.length && !shared.length) return null;
    const between = shared.length ? [[element("i", {}, "mean over its pairs"), "", "", ""]] : [];
    return titled(title, table(HEAD(), [...own, ...between, ...shared]), "readings");
  });
}

/* A line for each label of the metrics that have one for every head. */
function labelledRows(group, layer, head) {
  return metricsOf("labelled").filter((metric) => metric.group === group && unit(metric)).flatMap((metric) => range(size(metric, "label"))
    .map((label) => [label, look(metric, { layer, label, [unit(metric)]: unitOf(metric, layer, head) })]).filter(([, found]) => !Number.isNaN(found.value))
    .map(([label, found]) => [`${metric.title}: ${DATA.labels.label[label]}`, ...numbersOf(found)]));
}

const HEAD = () => ["", "value", "null ± sd", zNull()];

/* Value, null and distance, as the card's tables show them. */
function numbersOf(found) {
  return [withInterval(found), nullLines(found), distance(found)];
}

/* The null's mean, and its sd under it. */
function nullLines(found) {
  const [mean, sd] = nullText(found).split(" ± ");
  return element("span", { class: "n" }, mean, ...(sd ? [element("small", {}, `± ${sd}`)] : []));
}

/* A value with its interval under it. */
function withInterval(found) {
  const span = intervalText(found);
  return element("span", { class: "n" }, number(found.value, 3), ...(span ? [element("small", {}, span)] : []));
}

/* The distance from the null as a number with a bar, which stops at ± 6. Both are grey where the
   interval holds the null: on other documents the number might as well lie on its other side. */
function distance(found) {
  if (Number.isNaN(found.z)) return "–";
  const side = holdsNull(found) ? "held" : found.z < 0 ? "low" : "high";
  return element("span", { class: `distance ${side}` }, element("span", {}, number(found.z, 2)), element("meter", { class: side, min: 0, max: 6, value: Math.min(6, Math.abs(found.z)), "aria-hidden": "true" }));
}

function holdsNull({ low, high, mean }) {
  return low <= mean && mean <= high;
}

function nearest(layer, head, n = 3) {
  return metricsOf("matrix", "cross").filter((metric) => !metric.directed).map((metric) => {
    const found = partners(metric, layer, head).sort((a, b) => strength(metric, b) - strength(metric, a)).slice(0, n);
    return found.length ? titled(`${nearestOf(metric)} by ${lower(metric.title)}`, table(HEAD(), found.map((p) => partnerRow(metric, p, "_b"))), "partners") : null;
  });
}

function nearestOf(metric) {
  if (DATA.compared && state.run === "difference") return "With whom it changed most";
  return metric.shape === "cross" ? "Nearest heads in any layer" : "Nearest";
}

/* Heads of other layers that this one reads from, and those that read it. */
function composed(layer, head, n = 3) {
  return metricsOf("cross").filter((metric) => metric.directed).map((metric) => {
    const all = partners(metric, layer, head).sort((a, b) => strength(metric, b) - strength(metric, a));
    const from = all.filter((p) => isOwn(metric, p.at, layer, head, "_b")).slice(0, n);
    const to = all.filter((p) => isOwn(metric, p.at, layer, head, "")).slice(0, n);
    const rows = [...from.map((p) => partnerRow(metric, p, "", "from ")), ...to.map((p) => partnerRow(metric, p, "_b", "into "))];
    return rows.length ? titled(metric.title, table(HEAD(), rows), "partners") : null;
  });
}

function titled(title, content, kind = "") {
  return element("section", {}, element("h3", {}, title), classed(kind, content));
}

function classed(kind, content) {
  content.className = kind;
  return content;
}

function isOwn(metric, at, layer, head, end) {
  return at["layer" + end] === layer && at[unit(metric) + end] === unitOf(metric, layer, head);
}

/* A line for a partner: its name chooses it, the button beside chooses the two as a pair. */
function partnerRow(metric, pair, end, before = "") {
  const layer = end && "layer_b" in pair.at ? pair.at.layer_b : pair.at.layer;
  const other = { layer, head: headOf(metric, layer, pair.at[unit(metric) + end]) };
  const place = chooser(placeName(pair.at, end), other.layer, other.head);
  return [element("span", { class: "ends" }, before, place, " ", pairChooser({ layer: state.layer, head: state.head }, other)), ...numbersOf(pair)];
}

function words(layer, head) {
  return metricsOf("text").filter((metric) => unit(metric) && metric.value.dims.includes("layer")).map((metric) => {
    const u = unit(metric);
    const rest = metric.value.dims.filter((dim) => dim !== "layer" && dim !== u);
    const last = rest.pop();
    const at = { layer, [u]: unitOf(metric, layer, head) };
    const rows = places(metric, rest, at).map((place) => {
      const tokens = (last ? places(metric, [last], place) : [place]).map((p) => entry(metric, "value", p));
      return [rest.map((dim) => label(dim, place[dim])).join(" "), token(tokens)];
    }).filter(([, tokens]) => tokens.childElementCount);
    return rows.length ? titled(metric.title, table([rest.map((dim) => dim.replace(/_/g, " ")).join(", "), ""], rows)) : null;
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
