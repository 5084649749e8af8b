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

/* A table of rows of cells; a cell is text, a number, or an element. */
function table(head, rows, caption) {
  const line = (cells, tag) => element("tr", {}, ...cells.map((cell, i) => {
    const text = typeof cell === "number" ? number(cell) : cell;
    const attributes = typeof cell === "number" ? { class: "n" } : {};
    if (tag === "th") attributes.scope = "col";
    return i === 0 && tag === "td" ? element("th", { scope: "row" }, text) : element(tag, attributes, text);
  }));
  const made = element("table", {}, element("thead", {}, line(head, "th")), element("tbody", {}, ...rows.map((row) => line(row, "td"))));
  if (caption) made.prepend(element("caption", {}, caption));
  return made;
}

/* A button that chooses a head. */
function chooser(text, layer, head) {
  return element("button", { type: "button", class: "place", onclick: () => choose({ layer, head }) }, text);
}

function fill(select, options, chosen) {
  const key = JSON.stringify(options);
  if (select.dataset.options !== key) {
    select.dataset.options = key;
    select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  }
  select.value = String(chosen);
  select.disabled = options.length < 2;
}
