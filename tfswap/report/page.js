"use strict";
// What a report's page can do besides being read: name what is in memory under the pointer, zoom, filter and sort the
// table, and go from a tensor in a chart to its row and back. `data` is as tfswap/report/page.py writes it.
const data = JSON.parse(document.getElementById("data").textContent);
const SHOWN = 100, ALIVE = 8, NARROWEST = 30, DRAGGED_PX = 6;
document.querySelector("main").classList.add("scripted");

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let n = 0;
  for (; bytes >= 1024 && n < units.length - 1; n++) bytes /= 1024;
  return `${n ? bytes.toFixed(1) : bytes} ${units[n]}`;
}
function time(seconds) {
  return seconds >= 1 ? `${seconds.toFixed(3)} s` : seconds >= 1e-3 ? `${(1e3 * seconds).toFixed(2)} ms` : `${(1e6 * seconds).toFixed(1)} µs`;
}
function made(tag, props, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}
// The tensor that was chosen last, by name; what shows tensors is notified.
const followers = [];
function choose(name, from) { for (const follow of followers) follow(name, from); }
function pick(name, from) {
  const button = made("button", {className: "pick", title: name}, made("bdi", {}, name));
  button.addEventListener("click", () => choose(name, from));
  return button;
}
function entry(kind, content, amount) {
  const mark = made("i", {});
  mark.style.setProperty("--c", kind === null ? "transparent" : `var(--${data.kinds[kind]})`);
  const text = typeof content === "string" ? made("bdi", {}, content) : content;
  return made("p", {title: text.textContent}, mark, made("span", {}, text), made("b", {}, amount));
}
function ticks(low, high) {
  const raw = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * unit).find(s => s >= raw), found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n++) found.push(n * step);
  return found;
}
// The index of the last of `rows`, which rise by `rows[i][part]`, that begins at or before `at`.
function last(rows, part, at) {
  let low = 0, high = rows.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (rows[middle][part] <= at) low = middle; else high = middle - 1;
  }
  return low;
}

// The number of the last chart with the tensor, which is of the planned step; of the last chart for one in none.
function shownIn(name) {
  const found = data.runs.findLastIndex(run => run.holds.some(h => data.names[h[0]] === name));
  return found < 0 ? data.runs.length - 1 : found;
}

document.querySelectorAll(".plot").forEach((plot, number) => {
  const {columns, holds, blocks, count, width_s} = data.runs[number];
  const box = plot.querySelector(".box"), lanes = plot.querySelector(".lanes"), times = plot.querySelector(".times");
  const read = plot.nextElementSibling, areas = [box, ...plot.querySelectorAll(".lane")];
  const layer = name => areas.map(parent => parent.appendChild(made("div", {className: name, hidden: true})));
  const cursors = layer("cursor"), dragged = layer("dragged");
  const all = data.columns, seconds = column => column / all * width_s;
  let at = 0, from = 0, to = all, lives = [], dragging = null;

  const share = column => `${(column - from) / (to - from) * 100}%`;
  function lay(element, begin, end) {
    element.style.left = share(Math.max(begin, from));
    element.style.width = `${Math.max(0, Math.min(end, to) - Math.max(begin, from)) / (to - from) * 100}%`;
    element.hidden = end < from || begin > to;
  }
  function layAll() {
    for (const cursor of cursors) { cursor.hidden = at < from || at >= to; cursor.style.left = share(at + .5); }
    for (const {elements, begin, end} of lives) for (const element of elements) lay(element, begin, end);
  }
  function zoom(low, high) {
    const wide = Math.min(all, Math.max(NARROWEST, high - low));
    from = Math.max(0, Math.min(all - wide, low));
    to = from + wide;
    for (const svg of plot.querySelectorAll("svg")) svg.setAttribute("viewBox", `${from} 0 ${wide} ${svg.viewBox.baseVal.height}`);
    times.replaceChildren(...ticks(seconds(from), seconds(to)).map(t => {
      const label = made("span", {className: "tick x"}, time(t));
      label.style.left = share(t / width_s * all);
      return label;
    }));
    layAll();
  }
  const zoomBy = factor => { const wide = (to - from) * factor; zoom(at - wide * (at - from) / (to - from), at + wide * (to - at) / (to - from)); };

  function show(column) {
    at = Math.max(0, Math.min(all - 1, column));
    if (at < from || at >= to) zoom(at - (to - from) / 2, at + (to - from) / 2); else layAll();
    const [, state, ...kinds] = columns[last(columns, 0, at)];
    const total = kinds.reduce((a, b) => a + b, 0), now = seconds(at + .5);
    if (at >= count) { read.replaceChildren(made("div", {}, made("p", {className: "soft"}, "The step has ended."))); return; }
    const alive = holds.filter(h => h[3] <= state && state < h[4]).sort((a, b) => b[2] - a[2]);
    const shown = alive.slice(0, ALIVE), rest = total - kinds[data.margin] - shown.reduce((sum, h) => sum + h[2], 0);
    const half = data.width * seconds(1) / 2;
    const running = blocks.filter(b => b[3] <= now + half && now - half <= b[4]);
    read.replaceChildren(
      made("div", {}, made("p", {}, made("span", {}, `at ${time(now)}`), made("b", {}, size(total))),
        ...data.kinds.map((name, k) => [k, name, kinds[k]]).filter(e => e[2]).map(([k, name, n]) => entry(k, name, size(n))),
        ...running.slice(0, 4).map(b => entry(null, `${b[0]}: ${b[1] === "run" ? "" : b[1] + " "}${data.names[b[2]]}${b[5] > 1 ? ` and ${b[5] - 1} more` : ""}`, time(b[4] - b[3])))),
      made("div", {}, ...shown.map(h => entry(h[1], pick(data.names[h[0]], "chart"), size(h[2]))), ...rest > 0 ? [entry(null, "all others", size(rest))] : []));
  }
  followers.push((name, source) => {
    for (const {elements} of lives) for (const element of elements) element.remove();
    const begins = columns.map(([column, state]) => [state, column]).sort((a, b) => a[0] - b[0]);
    const columnOf = state => state <= begins[0][0] ? begins[0][1] : state > begins.at(-1)[0] ? count : begins[last(begins, 0, state)][1];
    lives = holds.filter(h => data.names[h[0]] === name).map(h => ({elements: layer("life"), begin: columnOf(h[3]), end: Math.max(columnOf(h[4]), columnOf(h[3]) + 1)}));
    layAll();
    if (source === "table" && number === shownIn(name)) {
      if (lives.length) show(lives[0].begin);
      box.scrollIntoView({block: "center"});
    }
  });

  const place = event => Math.floor(from + (event.clientX - box.getBoundingClientRect().left) / box.clientWidth * (to - from));
  for (const area of [box, lanes]) {
    area.addEventListener("pointerdown", event => { dragging = {x: event.clientX, column: place(event)}; show(place(event)); });
    area.addEventListener("pointermove", event => {
      if (dragging === null || Math.abs(event.clientX - dragging.x) < DRAGGED_PX) { show(place(event)); return; }
      for (const element of dragged) lay(element, Math.min(dragging.column, place(event)), Math.max(dragging.column, place(event)));
    });
  }
  addEventListener("pointerup", event => {
    if (dragging === null) return;
    for (const element of dragged) element.hidden = true;
    if (Math.abs(event.clientX - dragging.x) >= DRAGGED_PX) zoom(...[dragging.column, place(event)].sort((a, b) => a - b));
    dragging = null;
  });
  addEventListener("pointercancel", () => { dragging = null; for (const element of dragged) element.hidden = true; });
  const zooms = {in: () => zoomBy(.5), out: () => zoomBy(2), all: () => zoom(0, all)};
  plot.querySelectorAll("[data-zoom]").forEach(button => button.addEventListener("click", zooms[button.dataset.zoom]));
  box.addEventListener("dblclick", zooms.all);
  box.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key] * (event.shiftKey ? 25 : 1);
    const zooming = zooms[{"+": "in", "=": "in", "-": "out", 0: "all"}[event.key]];
    if (step || zooming) event.preventDefault();
    if (step) show(at + step * Math.max(1, Math.round((to - from) / 1000)));
    if (zooming) zooming();
  });
  show(data.runs[number].peak);
});

const table = document.querySelector("table.tensors");
if (table) {
  const body = table.tBodies[0], find = document.querySelector("input[type=search]"), more = document.querySelector(".more");
  const found = document.querySelector(".found");
  for (const row of data.rows) for (const part of ["name", "op", "where", "reason", "source"]) row[part] = data.names[row[part]];
  const switches = [...document.querySelectorAll(".switch")], tactics = new Set();
  let rows = data.rows, sorted = null, down = true, shown = SHOWN, chosen = null;
  const keys = [r => r.nbytes, r => r.tactic, r => r.name, r => r.reason, r => r.moved, r => r.cost_s];
  function draw() {
    const word = find.value.toLowerCase();
    rows = data.rows.filter(r => !tactics.size || r.tactic.split(", ").some(tactic => tactics.has(tactic)));
    rows = rows.filter(r => !word || `${r.name} ${r.op} ${r.tactic} ${r.source} ${r.where}`.toLowerCase().includes(word));
    if (sorted !== null) {
      const key = keys[sorted], order = (a, b) => typeof a === "number" ? a - b : a.localeCompare(b, "en", {numeric: true});
      rows.sort((a, b) => down ? order(key(b), key(a)) : order(key(a), key(b)));
    }
    body.replaceChildren(...rows.slice(0, shown).map(r => made("tr", {className: r.name === chosen ? "chosen" : ""},
      made("td", {className: "n"}, size(r.nbytes)),
      made("td", {}, made("span", {className: `tactic ${r.tactic.split(", ").pop()}`}, r.tactic)),
      made("td", {className: "name"}, pick(r.name, "table"), made("br", {}), made("span", {className: "soft"}, [r.op, r.source, r.where && `on ${r.where}`].filter(Boolean).join(" · "))),
      made("td", {className: "why"}, r.reason),
      made("td", {className: "n"}, r.moved ? size(r.moved) : ""),
      made("td", {className: "n"}, r.cost_s ? time(r.cost_s) : ""))));
    more.hidden = rows.length <= shown;
    found.textContent = `${rows.length} tensor${rows.length === 1 ? "" : "s"}`;
  }
  table.querySelectorAll("th").forEach((head, n) => head.querySelector("button").addEventListener("click", () => {
    down = sorted === n ? !down : n !== 1 && n !== 2 && n !== 3;
    sorted = n;
    table.querySelectorAll("th").forEach(h => h.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    draw();
  }));
  function restart() { shown = SHOWN; draw(); }
  find.addEventListener("input", restart);
  for (const button of switches) button.addEventListener("click", () => {
    const {tactic} = button.dataset, pressed = !tactics.delete(tactic);
    if (pressed) tactics.add(tactic);
    button.setAttribute("aria-pressed", pressed);
    restart();
  });
  followers.push((name, source) => {
    chosen = name;
    if (source === "chart") {
      tactics.clear();
      for (const button of switches) button.setAttribute("aria-pressed", false);
      find.value = name;
      restart();
      table.scrollIntoView({block: "center"});
    } else draw();
  });
  more.addEventListener("click", () => { shown += 10 * SHOWN; draw(); });
  draw();
}
