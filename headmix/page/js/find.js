/* From a name to the head, layer or metric that it names, and the box to type it in. */

/* A layer by its name, by number (5 is L5), or else by position; -1 where there is none. */
function layerNamed(text) {
  const names = DATA.layers.map((name) => name.toLowerCase());
  const wanted = text.trim().toLowerCase();
  for (const candidate of [wanted, `l${wanted}`]) if (names.includes(candidate)) return names.indexOf(candidate);
  return /^\d+$/.test(wanted) && Number(wanted) < names.length ? Number(wanted) : -1;
}

/* A layer and a head: L3H5, L3 H5, 3.5, encoder.L0 H2. The head may not exist: it is -1 then. */
function placeNamed(text) {
  const parts = /^(.*?)(?:[\s.,:]+h?|h)(\d+)$/i.exec(text.trim());
  const layer = parts?.[1] ? layerNamed(parts[1]) : -1;
  return layer < 0 ? null : { layer, head: headNumbered(layer, parts[2]) };
}

function headNumbered(layer, number) {
  const head = DATA.labels.head?.indexOf(String(Number(number))) ?? -1;
  return head >= 0 && headExists(layer, head) ? head : -1;
}

/* The head that a name stands for, or nothing. */
function headNamed(text) {
  const place = placeNamed(text);
  return place && place.head >= 0 ? place : null;
}

/* The metric of that name or title, or the only one whose title or name holds the text. */
function metricNamed(text) {
  const wanted = text.trim().toLowerCase();
  const names = (metric) => [metric.name, metric.title].map((name) => name.toLowerCase());
  const exact = DATA.metrics.find((metric) => names(metric).includes(wanted));
  const close = DATA.metrics.filter((metric) => wanted && names(metric).some((name) => name.includes(wanted)));
  return { metric: exact ?? (close.length === 1 ? close[0] : null), close };
}

/* What typed text asks for: { change, said }, where nothing changes if there is no such thing. */
function wanted(text) {
  const here = /^h\s*(\d+)$/i.exec(text.trim());
  const place = here ? { layer: state.layer, head: headNumbered(state.layer, here[1]) } : null;
  const layer = layerNamed(text);
  if (!place && layer >= 0) return { change: { layer }, said: `Layer ${DATA.layers[layer]}.` };
  const found = place ?? placeNamed(text);
  if (found?.head >= 0) return { change: found, said: `${placeName(found)}.` };
  if (found && DATA.heads) return { said: `${DATA.layers[found.layer]} has no such head: it has ${spanned(headsOf(found.layer).map((h) => `H${DATA.labels.head[h]}`))}.` };
  const { metric, close } = metricNamed(text);
  if (metric) return { change: { metric: metric.name }, said: `${metric.title}.` };
  if (close.length) return { said: `${close.length} metrics are called so: ${close.slice(0, 3).map(({ title }) => title).join("; ")}${close.length > 3 ? "; …" : "."}` };
  return { said: `Nothing here is called “${text.trim()}”. Layers are ${spanned(DATA.layers)}; ${DATA.heads ? `a head is named like ${placeName(state)}, ` : ""}a metric${DATA.heads ? "" : " is named"} by its title.` };
}

function headsOf(layer) {
  return range(DATA.heads).filter((head) => headExists(layer, head));
}

function spanned(names) {
  return names.length > 2 ? `${names[0]} – ${names.at(-1)}` : names.join(" and ");
}

function startSearch() {
  const box = byId("find");
  byId("find-names").append(...DATA.metrics.map(({ title }) => element("option", { value: title })));
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!box.value.trim()) return;
    const { change, said } = wanted(box.value);
    byId("found").textContent = said;
    box.setAttribute("aria-invalid", String(!change));
    if (!change) return;
    choose(change);
    box.select();
    bringIntoView(change);
  });
  box.addEventListener("input", () => { byId("found").textContent = ""; box.removeAttribute("aria-invalid"); });
}

/* A metric's first panel; a head's card where it is not beside the panels. */
function bringIntoView({ metric }) {
  const shows = (panel) => Object.entries(panel.offers()).some(([name, values]) => METRIC_CHOICES.includes(name) && values?.some(([value]) => value === metric));
  const panels = Object.keys(PANELS).filter((id) => shows(PANELS[id]));
  if (metric && panels.length) byId(panels[0]).scrollIntoView();
  if (!metric && matchMedia("(max-width: 1000px)").matches) byId("card").scrollIntoView();
}
