"use strict";
// The charts of a report's page, on canvases. A pixel shows the moment with the most bytes that it stands for. Tensors
// are drawn one by one where they are large enough to be seen, and named where there is room: zoom in for more.
const ALIVE = 8, NARROWEST = 30, DRAGGED_PX = 6, LEAST_HEIGHT = 3, MOST_DRAWN = 400, LABEL = {width: 60, height: 14, most: 80};
const charts = [];

function ticks(low, high) {
  const raw = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(m => m * unit).find(s => s >= raw), found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n++) found.push(n * step);
  return found;
}
// The number of the last chart with the tensor, which is of the planned step; of the last chart for one in none.
function shownIn(name) {
  const found = charts.findLastIndex(chart => chart.holdsOf(name).length);
  return found < 0 ? charts.length - 1 : found;
}
// A canvas in front of an element's SVG, in the screen's own pixels.
function canvasIn(parent) {
  parent.querySelector("svg")?.remove();
  const canvas = made("canvas", {ariaHidden: "true"});
  parent.prepend(canvas);
  return canvas;
}
function cleared(canvas) {
  const {width, height} = canvas.parentElement.getBoundingClientRect(), dense = devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * dense));
  canvas.height = Math.max(1, Math.round(height * dense));
  const pen = canvas.getContext("2d");
  pen.scale(dense, dense);
  return {pen, width: Math.max(1, Math.round(width)), height};
}

// A run's buffers, by column of the data (page.py): `at` are the columns at which the bytes change.
class Run {
  constructor(content) {
    Object.assign(this, content);
    this.at = rising(content.at);
    this.kinds = content.kinds.map(rising);
    this.total = this.at.map((_, i) => this.kinds.reduce((sum, kind) => sum + kind[i], 0));
    this.begin = rising(content.begin);
    this.end = this.begin.map((begin, h) => begin + content.length[h]);
    this.bySize = Int32Array.from(this.begin.keys()).sort((a, b) => this.nbytes[b] - this.nbytes[a]);
    this.byName = new Map();
    this.name.forEach((name, h) => this.byName.has(name) ? this.byName.get(name).push(h) : this.byName.set(name, [h]));
  }
  // The largest buffers in memory at a moment.
  alive(i, most) {
    const found = [];
    for (const h of this.bySize) if (this.begin[h] <= i && i < this.end[h] && found.push(h) === most) break;
    return found;
  }
  column(i) { return i < this.at.length ? this.at[i] : this.count; }
  // The bytes at each moment of the buffers with these names.
  bytesOf(names) {
    const change = new Float64Array(this.at.length + 1);
    for (const name of names) for (const h of this.byName.get(name) ?? []) {
      change[this.begin[h]] += this.nbytes[h];
      change[this.end[h]] -= this.nbytes[h];
    }
    return rising(change.subarray(0, this.at.length));
  }
}

class Chart {
  constructor(plot, content) {
    this.run = new Run(content);
    this.plot = plot;
    this.box = plot.querySelector(".box");
    this.top = Number(plot.dataset.top);
    this.size = unitOf(this.top);
    this.canvas = canvasIn(this.box);
    this.lanes = [...plot.querySelectorAll(".lane")].map(parent => ({parent, canvas: canvasIn(parent), blocks: content.blocks.filter(b => b[0] === parent.dataset.lane)}));
    this.areas = [this.box, ...this.lanes.map(lane => lane.parent)];
    this.all = data.columns;
    this.from = 0;
    this.to = this.all;
    this.cursor = 0;
    this.matches = null;
    this.lives = [];
    this.big = [];
    this.cursors = this.layer("cursor");
    this.dragged = this.layer("dragged");
    this.read = plot.nextElementSibling;
    this.listen();
  }
  layer(name) { return this.areas.map(parent => parent.appendChild(made("div", {className: name, hidden: true}))); }
  seconds(column) { return column / this.all * this.run.width_s; }
  share(column) { return `${(column - this.from) / (this.to - this.from) * 100}%`; }
  holdsOf(name) { return this.run.byName.get(numberOf(name)) ?? []; }
  atPeak() {
    const i = last(this.run.at, this.run.peak), found = this.run.alive(i, Infinity);
    return {alive: found.map(h => [this.run.name[h], this.run.nbytes[h]]), total: this.run.total[i]};
  }

  // For each pixel the number of the moment that it shows; -1 after the step's end.
  moments(width) {
    const {at, total, count} = this.run, wide = (this.to - this.from) / width, found = new Int32Array(width).fill(-1);
    let i = last(at, this.from);
    for (let x = 0; x < width; x++) {
      const low = this.from + x * wide;
      if (low >= count) break;
      while (i + 1 < at.length && at[i + 1] <= low) i++;
      let best = i;
      for (let j = i + 1; j < at.length && at[j] < low + wide; j++) if (total[j] > total[best]) best = j;
      found[x] = best;
    }
    return found;
  }
  // The buffers that are drawn one by one, by kind: those high and wide enough for this zoom.
  visible(width, height) {
    const {run} = this, per = width / (this.to - this.from), found = [];
    for (const h of run.bySize) {
      if (run.nbytes[h] / this.top * height < LEAST_HEIGHT || found.length === MOST_DRAWN) break;
      const begin = run.column(run.begin[h]), end = run.column(run.end[h]);
      if (end > this.from && begin < this.to && (end - begin) * per >= 2) found.push(h);
    }
    return data.kinds.map((_, kind) => found.filter(h => run.kind[h] === kind).sort((a, b) => a - b));
  }
  // What lies upon each other at a moment, from the bottom: [kind, buffer or -1 for the small ones, from, to] in bytes.
  stack(i) {
    const {run} = this, found = [];
    let y = 0;
    for (const kind of data.stack) {
      const alive = this.big[kind].filter(h => run.begin[h] <= i && i < run.end[h]);
      const rest = run.kinds[kind][i] - alive.reduce((sum, h) => sum + run.nbytes[h], 0);
      if (rest > 0) found.push([kind, -1, y, y += rest]);
      for (const h of alive) found.push([kind, h, y, y += run.nbytes[h]]);
    }
    return found;
  }
  draw() {
    const {pen, width, height} = cleared(this.canvas), style = getComputedStyle(this.box), colour = name => style.getPropertyValue(`--${name}`).trim();
    const colours = data.kinds.map(colour), paper = colour("paper"), ink = colour("ink");
    const moments = this.moments(width), y = bytes => height * (1 - bytes / this.top);
    this.big = this.visible(width, height);
    for (let x = 0; x < width;) {
      const i = moments[x];
      let until = x + 1;
      while (until < width && moments[until] === i) until++;
      if (i >= 0) for (const [kind, h, low, high] of this.stack(i)) {
        pen.fillStyle = colours[kind];
        pen.fillRect(x, y(high), until - x, y(low) - y(high));
        if (h < 0) continue;
        pen.fillStyle = paper;
        pen.globalAlpha = .55;
        pen.fillRect(x, y(high), until - x, 1);
        if (this.run.begin[h] === i) pen.fillRect(x, y(high), 1, y(low) - y(high));
        pen.globalAlpha = 1;
      }
      x = until;
    }
    this.label(pen, moments, width, y);
    if (this.matches) this.outline(pen, moments, y, ink);
    const grid = colour("line");
    for (const tick of this.box.querySelectorAll(".tick.y")) { pen.fillStyle = grid; pen.globalAlpha = .6; pen.fillRect(0, Math.round(parseFloat(tick.style.top) / 100 * height), width, 1); pen.globalAlpha = 1; }
    for (const rule of JSON.parse(this.plot.dataset.rules)) {
      pen.strokeStyle = colour(rule[0]);
      pen.lineWidth = 1.8;
      pen.setLineDash(rule[0] === "limit" ? [7, 4] : [2, 3]);
      pen.beginPath();
      pen.moveTo(0, y(rule[1]));
      pen.lineTo(width, y(rule[1]));
      pen.stroke();
      pen.setLineDash([]);
    }
    for (const lane of this.lanes) this.drawLane(lane, colour);
  }
  // The names of the largest buffers, each in the middle of what is seen of it.
  label(pen, moments, width, y) {
    const {run} = this, per = width / (this.to - this.from), x = column => Math.max(0, Math.min(width, (column - this.from) * per));
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    let left = LABEL.most;
    for (const h of this.big.flat().sort((a, b) => run.nbytes[b] - run.nbytes[a])) {
      const low = x(run.column(run.begin[h])), high = x(run.column(run.end[h]));
      if (high - low < LABEL.width || !left--) continue;
      const place = this.stack(Math.max(0, moments[Math.min(moments.length - 1, Math.floor((low + high) / 2))])).find(part => part[1] === h);
      if (!place || y(place[2]) - y(place[3]) < LABEL.height) continue;
      pen.save();
      pen.beginPath();
      pen.rect(low + 4, y(place[3]), high - low - 8, y(place[2]) - y(place[3]));
      pen.clip();
      pen.fillStyle = ["variables", "activations"].includes(data.kinds[place[0]]) ? "#ffffff" : "#000000";
      const name = data.names[run.name[h]].split("/").at(-1), text = `${name}  ${this.size(run.nbytes[h])}`;
      const space = high - low - 8, wide = pen.measureText(text).width;
      pen.fillText(text, wide < space ? (low + high - wide) / 2 : low + 4, (y(place[2]) + y(place[3])) / 2);
      pen.restore();
    }
  }
  // The bytes of what the search finds, as a dark area from below.
  outline(pen, moments, y, ink) {
    pen.fillStyle = ink;
    moments.forEach((i, x) => {
      if (i < 0 || !this.matches[i]) return;
      pen.globalAlpha = .4;
      pen.fillRect(x, y(this.matches[i]), 1, y(0) - y(this.matches[i]));
      pen.globalAlpha = 1;
      pen.fillRect(x, y(this.matches[i]) - 1, 1, 2);
    });
  }
  drawLane({canvas, blocks}, colour) {
    const {pen, width, height} = cleared(canvas), per = width / (this.to - this.from);
    let taken = -1;
    for (const [, kind, , start, long] of blocks) {
      if (start + long < this.from) continue;
      if (start > this.to) break;
      const x = (start - this.from) * per, wide = Math.max(1, long * per);
      if (wide === 1 && kind !== "again" && kind !== "wait" && Math.floor(x) === taken) continue;
      taken = Math.floor(x);
      pen.fillStyle = colour(data.colours[kind]);
      pen.fillRect(x, 1, wide, height - 2);
      if (wide > 8) { pen.fillStyle = colour("paper"); pen.globalAlpha = .6; pen.fillRect(x + wide - 1, 1, 1, height - 2); pen.globalAlpha = 1; }
    }
  }

  lay(element, begin, end) {
    element.style.left = this.share(Math.max(begin, this.from));
    element.style.width = `${Math.max(0, Math.min(end, this.to) - Math.max(begin, this.from)) / (this.to - this.from) * 100}%`;
    element.hidden = end < this.from || begin > this.to;
  }
  layAll() {
    for (const cursor of this.cursors) { cursor.hidden = this.cursor < this.from || this.cursor >= this.to; cursor.style.left = this.share(this.cursor + .5); }
    for (const {elements, begin, end} of this.lives) for (const element of elements) this.lay(element, begin, end);
  }
  zoom(low, high) {
    const wide = Math.min(this.all, Math.max(NARROWEST, high - low));
    this.from = Math.max(0, Math.min(this.all - wide, low));
    this.to = this.from + wide;
    this.plot.dataset.view = `${this.from} ${this.to}`;
    this.plot.querySelector(".times").replaceChildren(...ticks(this.seconds(this.from), this.seconds(this.to)).map(t => {
      const label = made("span", {className: "tick x"}, time(t));
      label.style.left = this.share(t / this.run.width_s * this.all);
      return label;
    }));
    this.layAll();
    this.draw();
  }
  zoomBy(factor, at = this.cursor) {
    const wide = (this.to - this.from) * factor;
    this.zoom(at - wide * (at - this.from) / (this.to - this.from), at + wide * (this.to - at) / (this.to - this.from));
  }
  show(column) {
    const {run} = this;
    this.cursor = Math.max(0, Math.min(this.all - 1, column));
    if (this.cursor < this.from || this.cursor >= this.to) { const wide = this.to - this.from; this.zoom(this.cursor - wide / 2, this.cursor + wide / 2); } else this.layAll();
    if (this.cursor >= run.count) { this.read.replaceChildren(made("div", {}, made("p", {className: "soft"}, "The step has ended."))); return; }
    const i = last(run.at, this.cursor), now = this.seconds(this.cursor + .5), shown = run.alive(i, ALIVE);
    const small = unitOf(shown.length ? run.nbytes[shown[0]] : 0);
    const rest = run.total[i] - run.kinds[data.margin][i] - shown.reduce((sum, h) => sum + run.nbytes[h], 0);
    const running = this.lanes.flatMap(lane => lane.blocks.filter(b => b[3] <= this.cursor + 1 && this.cursor <= b[3] + b[4]).slice(0, 2));
    const named = b => `${b[0]}: ${b[1] === "run" ? "" : `${b[1]} `}${data.names[b[2]]}${b[5] > 1 ? ` and ${b[5] - 1} more` : ""}`;
    this.read.replaceChildren(
      made("div", {}, made("p", {}, made("span", {}, `at ${time(now)}`), made("b", {}, this.size(run.total[i]))),
        ...this.matches ? [entry(null, "found by the search", this.size(this.matches[i]))] : [],
        ...data.kinds.map((name, k) => [k, name, run.kinds[k][i]]).filter(e => e[2]).map(([k, name, n]) => entry(k, name, this.size(n))),
        ...running.slice(0, 4).map(b => entry(null, named(b), time(this.seconds(b[4]))))),
      made("div", {}, ...shown.map(h => entry(run.kind[h], pick(data.names[run.name[h]], "chart"), small(run.nbytes[h]))), ...rest > 0 ? [entry(null, "all others", small(rest))] : []));
  }
  follow(name, source) {
    for (const {elements} of this.lives) for (const element of elements) element.remove();
    const {run} = this;
    this.lives = this.holdsOf(name).map(h => ({elements: this.layer("life"), begin: run.column(run.begin[h]), end: Math.max(run.column(run.end[h]), run.column(run.begin[h]) + 1)}));
    this.layAll();
    if (source === "table" && this === charts[shownIn(name)]) {
      if (this.lives.length) this.show(this.lives[0].begin);
      this.box.scrollIntoView({block: "center"});
    }
  }
  // Shows the bytes of these names' buffers; null for none. Gives the most of these at the same time.
  search(names) {
    this.matches = names && this.run.bytesOf(names);
    this.draw();
    this.show(this.cursor);
    return this.matches ? this.matches.reduce((a, b) => Math.max(a, b), 0) : 0;
  }
  // The name of the tensor that is drawn at a point of the window; "" for none.
  under(event) {
    const place = this.box.getBoundingClientRect(), bytes = (1 - (event.clientY - place.top) / place.height) * this.top;
    if (this.place(event) >= this.run.count) return "";
    const width = Math.max(1, Math.round(place.width)), x = Math.max(0, Math.min(width - 1, Math.floor(event.clientX - place.left)));
    const i = this.moments(width)[x], found = i < 0 ? undefined : this.stack(i).find(part => part[1] >= 0 && part[2] <= bytes && bytes < part[3]);
    return found ? data.names[this.run.name[found[1]]] : "";
  }
  place(event) {
    const edge = this.box.getBoundingClientRect();
    return Math.floor(this.from + (event.clientX - edge.left) / edge.width * (this.to - this.from));
  }
  listen() {
    let dragging = null;
    const endDrag = () => { dragging = null; for (const element of this.dragged) element.hidden = true; };
    for (const area of [this.box, this.plot.querySelector(".lanes")]) {
      area.addEventListener("pointerdown", event => { dragging = {x: event.clientX, column: this.place(event), area}; this.show(this.place(event)); });
      area.addEventListener("pointermove", event => {
        if (dragging === null || Math.abs(event.clientX - dragging.x) < DRAGGED_PX) {
          this.show(this.place(event));
          if (area === this.box) this.box.title = this.under(event);
          return;
        }
        for (const element of this.dragged) this.lay(element, Math.min(dragging.column, this.place(event)), Math.max(dragging.column, this.place(event)));
      });
      area.addEventListener("wheel", event => {
        if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
        event.preventDefault();
        const by = event.deltaY || event.deltaX, wide = this.to - this.from;
        if (event.ctrlKey) this.zoomBy(1.002 ** by, this.place(event)); else this.zoom(this.from + by / 1000 * wide, this.to + by / 1000 * wide);
      }, {passive: false});
    }
    addEventListener("pointerup", event => {
      if (dragging === null) return;
      const {x, column, area} = dragging;
      endDrag();
      if (Math.abs(event.clientX - x) >= DRAGGED_PX) this.zoom(...[column, this.place(event)].sort((a, b) => a - b));
      else if (area === this.box && this.under(event)) choose(this.under(event), "point");
    });
    addEventListener("pointercancel", endDrag);
    const zooms = {in: () => this.zoomBy(.5), out: () => this.zoomBy(2), all: () => this.zoom(0, this.all)};
    this.plot.querySelectorAll("[data-zoom]").forEach(button => button.addEventListener("click", zooms[button.dataset.zoom]));
    this.box.addEventListener("dblclick", zooms.all);
    this.box.addEventListener("keydown", event => {
      const step = {ArrowLeft: -1, ArrowRight: 1}[event.key] * (event.shiftKey ? 25 : 1) * Math.max(1, Math.round((this.to - this.from) / 1000));
      const moves = {Home: 0, End: this.run.count - 1, p: this.run.peak}[event.key];
      const zooming = zooms[{"+": "in", "=": "in", "-": "out", 0: "all"}[event.key]];
      const next = {ArrowUp: -1, ArrowDown: 1}[event.key];
      if (step || zooming || next || moves !== undefined) event.preventDefault();
      if (step) this.show(this.cursor + step);
      if (moves !== undefined) this.show(moves);
      if (zooming) zooming();
      if (next) this.chooseNext(next);
    });
  }
  // Chooses the next of the largest tensors under the cursor.
  chooseNext(by) {
    const names = this.run.alive(last(this.run.at, this.cursor), ALIVE).map(h => data.names[this.run.name[h]]);
    this.chosen = names[(names.indexOf(this.chosen) + by + names.length + (by < 0 && !names.includes(this.chosen) ? 1 : 0)) % names.length];
    if (this.chosen) choose(this.chosen, "point");
  }
}

let numbers = null;
function numberOf(name) {
  numbers ??= new Map(data.names.map((each, n) => [each, n]));
  return numbers.get(name);
}

function showCharts() {
  document.querySelectorAll(".plot").forEach((plot, number) => {
    const chart = new Chart(plot, data.runs[number]);
    charts.push(chart);
    followers.push((name, source) => chart.follow(name, source));
    searchers.push(names => chart.search(names));
    chart.zoom(0, chart.all);
    chart.show(chart.run.peak);
  });
  const redraw = () => { for (const chart of charts) chart.draw(); };
  addEventListener("resize", redraw);
  for (const query of ["(prefers-color-scheme: dark)", `(resolution: ${devicePixelRatio || 1}dppx)`]) matchMedia(query).addEventListener("change", redraw);
  document.querySelectorAll("details.device").forEach(part => part.addEventListener("toggle", redraw));
}
