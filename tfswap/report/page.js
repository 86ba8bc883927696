"use strict";
// What a report's page can do besides being read: tell what is alive under the pointer, and sort its table.
// `data` is as tfswap/report/page.py writes it.
const data = JSON.parse(document.getElementById("data").textContent);
const SHOWN = 100, ALIVE = 8;

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
function entry(kind, text, amount) {
  const mark = made("i", {});
  mark.style.setProperty("--c", kind === null ? "transparent" : `var(--${data.kinds[kind]})`);
  return made("p", {title: text}, mark, made("span", {}, made("bdi", {}, text)), made("b", {}, amount));
}

document.querySelectorAll(".plot").forEach((plot, number) => {
  const {columns, holds, blocks, count, width_s} = data.runs[number];
  const box = plot.querySelector(".box"), read = plot.nextElementSibling;
  const cursors = [...plot.querySelectorAll(".box, .lane")].map(parent => parent.appendChild(made("div", {className: "cursor", hidden: true})));
  let at = 0;
  function show(column) {
    at = Math.max(0, Math.min(data.columns - 1, column));
    let low = 0, high = columns.length - 1;  // the last that begins at or before it
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (columns[middle][0] <= at) low = middle; else high = middle - 1;
    }
    const [, state, ...kinds] = columns[low];
    const total = kinds.reduce((a, b) => a + b, 0), now = (at + .5) / data.columns * width_s;
    for (const cursor of cursors) { cursor.hidden = false; cursor.style.left = `${(at + .5) / data.columns * 100}%`; }
    if (at >= count) { read.replaceChildren(made("div", {}, made("p", {className: "soft"}, "The step has ended."))); return; }
    const alive = holds.filter(h => h[3] <= state && state < h[4]).sort((a, b) => b[2] - a[2]);
    const shown = alive.slice(0, ALIVE), rest = total - shown.reduce((sum, h) => sum + h[2], 0);
    const half = data.width / data.columns * width_s / 2;
    const running = blocks.filter(b => b[3] <= now + half && now - half <= b[4]);
    read.replaceChildren(
      made("div", {}, made("p", {}, made("span", {}, `at ${time(now)}`), made("b", {}, size(total))),
        ...data.kinds.map((name, k) => [k, name, kinds[k]]).filter(e => e[2]).map(([k, name, n]) => entry(k, name, size(n))),
        ...running.slice(0, 4).map(b => entry(null, `${b[0]}: ${b[1] === "run" ? "" : b[1] + " "}${data.names[b[2]]}${b[5] > 1 ? ` and ${b[5] - 1} more` : ""}`, time(b[4] - b[3])))),
      made("div", {}, ...shown.map(h => entry(h[1], data.names[h[0]], size(h[2]))), ...rest > 0 ? [entry(null, "all others", size(rest))] : []));
  }
  const place = event => Math.floor((event.clientX - box.getBoundingClientRect().left) / box.clientWidth * data.columns);
  for (const area of plot.querySelectorAll(".box, .lanes"))
    for (const kind of ["pointermove", "pointerdown"]) area.addEventListener(kind, event => show(place(event)));
  box.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key] * (event.shiftKey ? 25 : 1);
    if (step) { event.preventDefault(); show(at + step); }
  });
  show(data.runs[number].peak);
});

const table = document.querySelector("table.tensors");
if (table) {
  const body = table.tBodies[0], find = document.querySelector("input[type=search]"), more = document.querySelector(".more");
  const found = document.querySelector(".found");
  for (const row of data.rows) for (const part of ["name", "op", "reason", "source"]) row[part] = data.names[row[part]];
  let rows = data.rows, sorted = null, down = true, shown = SHOWN;
  const keys = [r => r.nbytes, r => r.tactic, r => r.name, r => r.reason, r => r.moved, r => r.cost_s];
  function draw() {
    const word = find.value.toLowerCase();
    rows = data.rows.filter(r => !word || `${r.name} ${r.op} ${r.tactic} ${r.source}`.toLowerCase().includes(word));
    if (sorted !== null) {
      const key = keys[sorted], order = (a, b) => typeof a === "number" ? a - b : a.localeCompare(b, "en", {numeric: true});
      rows.sort((a, b) => down ? order(key(b), key(a)) : order(key(a), key(b)));
    }
    body.replaceChildren(...rows.slice(0, shown).map(r => made("tr", {},
      made("td", {className: "n"}, size(r.nbytes)),
      made("td", {}, made("span", {className: `tactic ${r.tactic.split(", ").pop()}`}, r.tactic)),
      made("td", {className: "name"}, r.name, made("br", {}), made("span", {className: "soft"}, r.source ? `${r.op} · ${r.source}` : r.op)),
      made("td", {className: "why"}, r.reason),
      made("td", {className: "n"}, r.moved ? size(r.moved) : ""),
      made("td", {className: "n"}, r.cost_s ? time(r.cost_s) : ""))));
    more.hidden = rows.length <= shown;
    found.textContent = `${rows.length} tensors`;
  }
  table.querySelectorAll("th").forEach((head, n) => head.querySelector("button").addEventListener("click", () => {
    down = sorted === n ? !down : n !== 1 && n !== 2 && n !== 3;
    sorted = n;
    table.querySelectorAll("th").forEach(h => h.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    draw();
  }));
  find.addEventListener("input", () => { shown = SHOWN; draw(); });
  more.addEventListener("click", () => { shown += 10 * SHOWN; draw(); });
  draw();
}
