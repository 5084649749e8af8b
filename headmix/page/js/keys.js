/* The keyboard: arrow keys move the chosen head, / goes to the search box. */

const STEPS = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

function onKey(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || event.defaultPrevented || isTyping(event.target)) return;
  if (event.key === "/") {
    event.preventDefault();
    byId("find").focus();
  }
  const step = STEPS[event.key];
  if (!step || event.shiftKey || !DATA.heads || scrolls(event.target, step[0] ? "Height" : "Width")) return;
  event.preventDefault();
  moveHead(...step);
}

/* One step along the layers shown and the heads there are. */
function moveHead(up, right) {
  const next = (places, at, step) => places[Math.min(places.length - 1, Math.max(0, places.indexOf(at) + step))];
  const layers = shownLayers();
  const layer = up && layers.includes(state.layer) ? next(layers, state.layer, up) : up ? layers[0] : state.layer;
  choose({ layer, head: next(headsOf(layer), state.head, right) ?? 0 }, { quick: true });
}

function isTyping(target) {
  return target.closest?.("input, select, textarea, [contenteditable]");
}

/* Whether the focus lies in something that the arrow keys scroll, other than the page itself. */
function scrolls(target, side) {
  for (let node = target; node && node !== document.body && node !== document.documentElement; node = node.parentElement) {
    const overflow = getComputedStyle(node)[side === "Height" ? "overflowY" : "overflowX"];
    if (/auto|scroll/.test(overflow) && node[`scroll${side}`] > node[`client${side}`] + 1) return true;
  }
  return false;
}
