/* Building the page: text goes in as text, never as markup. */

function byId(id) {
  return document.getElementById(id);
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else made.setAttribute(name, value);
  }
  made.append(...children); // strings become text nodes
  return made;
}

/* A table of rows of cells; a cell is text, a number, or an element. Columns of numbers line up at
   the right, under their heads. */
function table(head, rows) {
  const numeric = head.map((_, i) => rows.some((row) => typeof row[i] === "number" || row[i]?.className === "n"));
  const cell = (tag, content, i, more = {}) =>
    element(tag, { ...more, ...(numeric[i] ? { class: "n" } : {}) }, typeof content === "number" ? number(content) : content);
  return element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((title, i) => (title === "" ? element("td") : cell("th", title, i, { scope: "col" }))))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((content, i) => (i ? cell("td", content, i) : cell("th", content, i, { scope: "row" })))))));
}

/* The head of a column of distances from the null. */
function zNull() {
  return element("span", {}, "z", element("sub", {}, "null"));
}

/* A button that chooses a head. */
function chooser(text, layer, head) {
  return element("button", { type: "button", class: "place", "data-focus": text, onclick: () => choose({ layer, head }) }, text);
}

/* A button that chooses two heads as a pair. */
function pairChooser(head, other) {
  const name = `${placeName(head)} and ${placeName(other)} as a pair`;
  return element("button", { type: "button", class: "with", "data-focus": name, "aria-label": name, title: name, onclick: () => choose({ ...head, other }) }, "pair");
}

/* Replace what is in a place. The focus goes to what is called the same in it, of several to the one
   that stands as far down among them; where nothing is, to the place itself, so that Tab goes on there. */
function refill(id, ...content) {
  const place = byId(id);
  const { scrollLeft, scrollTop } = place;
  const held = document.activeElement;
  const within = place.contains(held);
  const same = () => [...place.querySelectorAll("[data-focus]")].filter((found) => found.dataset.focus === held.dataset.focus);
  const nth = same().indexOf(held);
  place.replaceChildren(...content);
  if (within && held !== place) {
    if (!place.hasAttribute("tabindex")) place.tabIndex = -1;
    (same()[nth] ?? same()[0] ?? place).focus({ preventScroll: true });
  }
  Object.assign(place, { scrollLeft, scrollTop });
}

/* Options under the heading of their group, where there is more than one. */
function grouped(offered) {
  const option = ([value, text]) => element("option", { value }, text);
  const groups = [...new Set(offered.map(([, , group]) => group))];
  if (groups.length < 2) return offered.map(option);
  return groups.map((group) => element("optgroup", { label: GROUPS[group] }, ...offered.filter((o) => o[2] === group).map(option)));
}

const GROUPS = { weights: "From the weights", text: "On text" };

/* Offer options in a select; no options means that the choice does not apply now. */
function fill(select, offered, chosen) {
  select.closest("label").hidden = !offered;
  if (!offered) return;
  const key = JSON.stringify(offered);
  if (select.dataset.options !== key) {
    select.dataset.options = key;
    select.replaceChildren(...grouped(offered));
  }
  select.value = String(chosen);
  select.disabled = offered.length < 2;
}
