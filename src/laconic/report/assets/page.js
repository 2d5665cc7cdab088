"use strict";
(() => {
  // All text goes into the page as text: nothing that a run is called can become markup.

  // --- elements --------------------------------------------------------------------------------------------------
  const SVG = "http://www.w3.org/2000/svg";
  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name.startsWith("--")) element.style.setProperty(name, value);
      else element.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat(9)) if (child !== null && child !== undefined && child !== "") element.append(child);
    return element;
  }
  const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
  const byId = (id) => document.getElementById(id);

  // --- numbers for people ----------------------------------------------------------------------------------------
  const known = (v) => v !== null && v !== undefined && Number.isFinite(v);
  const count = (v) => Math.round(v).toLocaleString("en-US");
  const percent = (v, digits = 1) => (known(v) ? `${(100 * v).toFixed(digits)}\u00a0%` : "–");
  const plain = (v) => (known(v) ? (Math.abs(v) >= 1000 ? count(v) : String(Number(v.toPrecision(3)))) : "–");
  function bytes(v) {
    if (!known(v)) return "–";
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let k = 0;
    while (k < units.length - 1 && Math.abs(v) >= 999.5) { v /= 1000; k += 1; }
    return `${k === 0 ? Number(v.toPrecision(3)) : v.toPrecision(3)}\u00a0${units[k]}`;
  }
  const tickBytes = (v) => bytes(v).replace(/\.?0+(?=\s)/, (zeros) => (zeros[0] === "." ? "" : zeros)).replace(/(\.\d*?)0+(?=\s)/, "$1");
  function duration(v) {
    if (!known(v)) return "–";
    if (v < 90) return `${v.toFixed(v < 10 ? 1 : 0)}\u00a0s`;
    return v < 5400 ? `${Math.round(v / 60)}\u00a0min` : `${(v / 3600).toFixed(1)}\u00a0h`;
  }
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  function spread(values) {
    if (values.length < 2) return null;
    const m = mean(values);
    return Math.sqrt(values.reduce((a, b) => a + (b - m) ** 2, 0) / (values.length - 1));
  }
  const some = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

  const WORDS = {
    global_accuracy: "server’s model", local_accuracy: "clients’ models", local_accuracy_worst_decile: "worst tenth of clients",
    newcomer_accuracy: "newcomer", global_loss: "server’s loss", local_loss: "clients’ loss",
    local_loss_worst_decile: "worst tenth’s loss",
  };
  const EXPLAINED = {
    global_accuracy: "The server’s model on the common test set", local_accuracy: "Each client’s model on the client’s own test data, mean over clients",
    local_accuracy_worst_decile: "Clients’ models on their own test data, mean over the worst tenth of clients", newcomer_accuracy: "The device that joined late, on its own test data",
    global_loss: "Loss of the server’s model on the common test set", local_loss: "Loss of each client’s model on the client’s own test data, mean over clients",
    local_loss_worst_decile: "Loss of clients’ models on their own test data, mean over the worst tenth of clients",
  };
  const isLoss = (name) => name !== null && name.includes("loss");
  const formatOf = (name) => (isLoss(name) ? plain : percent);
  const colour = (i) => `var(--c${i % 8})`;
  const dashes = [null, "7 4", "2 4", "9 3 2 3"];
  const dash = (i) => dashes[Math.floor(i / 8) % dashes.length];

  // --- what the page shows, and what its reader chose ------------------------------------------------------------
  let data = { groups: [], runs: [], splits: [], different: [], unreadable: [] };
  const live = document.documentElement.dataset.live !== undefined;
  const chosen = { off: new Set(), layersOff: new Set(), zoom: {}, open: new Set(), figure: null, way: "total", sparse: null, split: 0 };
  const key = (group) => data.groups[group].label;
  const visible = (group) => !chosen.off.has(key(group));
  const runsOf = (group) => data.runs.filter((run) => run.group === group);
  const figures = () => Object.keys(WORDS).filter((name) => data.runs.some((run) => (run.evaluations.figures[name] || []).some(known)));

  // A group's curve: at every evaluated round the mean over the seeds that have it, and their standard deviation.
  function curve(group, name, x) {
    const at = new Map();
    for (const run of runsOf(group)) {
      const found = run.evaluations, values = found.figures[name] || [];
      found.round.forEach((round, i) => {
        if (!known(values[i])) return;
        if (!at.has(round)) at.set(round, { round, xs: [], ys: [], up: [], down: [] });
        const point = at.get(round);
        point.xs.push(x(found, i)); point.ys.push(values[i]); point.up.push(found.up[i]); point.down.push(found.down[i]);
      });
    }
    return [...at.values()].sort((a, b) => a.round - b.round).map((p) => {
      const y = mean(p.ys), std = spread(p.ys);
      return { round: p.round, x: mean(p.xs), y, std, lo: std === null ? null : y - std, hi: std === null ? null : y + std,
        seeds: p.ys.length, up: mean(p.up), down: mean(p.down) };
    });
  }
  const byRound = (found, i) => found.round[i];
  const byBytes = (found, i) => (chosen.way === "total" ? found.up[i] + found.down[i] : found[chosen.way][i]);
  const last = (run, name) => { const v = (run.evaluations.figures[name] || []).filter(known); return v.length ? v[v.length - 1] : null; };
  const ofSeeds = (point, group) => {
    const all = runsOf(group).length;
    return all < 2 ? "" : point.seeds === all ? `mean of ${all} seeds` : `mean of ${point.seeds} of ${all} seeds`;
  };

  // --- plots -----------------------------------------------------------------------------------------------------
  function linearTicks(low, high, about, whole) {
    const raw = (high - low) / Math.max(1, about), power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((m) => m >= raw * 0.999 && (!whole || Number.isInteger(m)));
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-12) + 1e-12; k += 1) ticks.push(Number((k * step).toPrecision(12)));
    return ticks;
  }
  function logTicks(low, high, about) {
    const decades = Math.log10(high / low);
    const marks = decades <= about / 3 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil(decades / about));
    const ticks = [];
    for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k += 1) {
      if (marks.length === 1 && k % every) continue;
      for (const m of marks) if (m * 10 ** k >= low * 0.9999 && m * 10 ** k <= high * 1.0001) ticks.push(Number((m * 10 ** k).toPrecision(6)));
    }
    return ticks.length > 1 ? ticks : [low, high];
  }
  function scale(axis, low, high, from, to) {
    const f = axis.log ? Math.log10 : (v) => v, inverse = axis.log ? (v) => 10 ** v : (v) => v;
    const a = f(low), b = f(high) === a ? a + 1 : f(high);
    const place = (v) => from + ((f(v) - a) / (b - a)) * (to - from);
    place.back = (p) => inverse(a + ((p - from) / (to - from)) * (b - a));
    return place;
  }
  function extent(axis, values) {
    const good = values.filter((v) => known(v) && (!axis.log || v > 0));
    if (!good.length) return axis.log ? [1, 10] : [0, 1];
    let low = good.reduce((a, b) => Math.min(a, b)), high = good.reduce((a, b) => Math.max(a, b));
    if (axis.log) {
      const room = Math.max(1.08, (high / low) ** 0.03);
      return [low / room, high * room];
    }
    const room = (high - low || Math.abs(high) || 1) * 0.05;
    low -= room; high += room;
    if (axis.floor !== undefined) low = Math.max(axis.floor, low);
    if (axis.ceiling !== undefined) high = Math.min(axis.ceiling, high);
    return axis.fromZero ? [0, high] : [low, high];
  }
  // A little hollow around the pointer's words, inside the plot whatever its width.
  function showTip(host, tip, x, y, content) {
    tip.replaceChildren(...content);
    tip.hidden = false;
    const room = host.clientWidth, wide = tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room - wide, x + 14 + wide > room ? x - wide - 14 : x + 14))}px`;
    tip.style.top = `${Math.max(0, Math.min(host.clientHeight - tip.offsetHeight, y - tip.offsetHeight - 10))}px`;
  }
  const row = (own, name, value) => h("div", {}, own ? h("i", { "--own": own }) : "", h("span", {}, name), h("b", {}, value));

  // spec: x, y (axes: label, format, log, floor, ceiling), series (own, dash, points, thin, marks, name), front, nearest, head, height.
  function plot(host, id, spec) {
    const width = host.clientWidth, phone = width < 480;
    if (!width) return;
    const height = phone ? Math.min(spec.height, 270) : spec.height;
    const margin = { left: phone ? 46 : 54, right: phone ? 8 : 14, top: 10, bottom: 40 };
    const zoom = chosen.zoom[id];
    const all = spec.series.flatMap((series) => series.points);
    const xs = zoom ? zoom.x : extent(spec.x, all.map((p) => p.x));
    const ys = zoom ? zoom.y : extent(spec.y, all.flatMap((p) => [p.y, p.lo, p.hi]));
    const px = scale(spec.x, xs[0], xs[1], margin.left, width - margin.right);
    const py = scale(spec.y, ys[0], ys[1], height - margin.bottom, margin.top);
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${spec.y.label} against ${spec.x.label}` });
    const clip = `clip-${id}`;
    svg.append(s("defs", {}, s("clipPath", { id: clip }, s("rect", { x: margin.left - 5, y: margin.top - 6, width: width - margin.left - margin.right + 10, height: height - margin.top - margin.bottom + 12 }))));
    const ticksX = (spec.x.log ? logTicks : linearTicks)(xs[0], xs[1], Math.max(2, Math.floor(width / (phone ? 80 : 105))), spec.x.tick === count);
    const ticksY = (spec.y.log ? logTicks : linearTicks)(ys[0], ys[1], Math.max(3, Math.floor(height / 58)));
    for (const v of ticksY) {
      svg.append(s("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: py(v), y2: py(v) }),
        s("text", { x: margin.left - 8, y: py(v) + 4, "text-anchor": "end" }, spec.y.tick(v)));
    }
    for (const v of ticksX) {
      svg.append(s("line", { class: "grid", x1: px(v), x2: px(v), y1: margin.top, y2: height - margin.bottom }),
        s("text", { x: px(v), y: height - margin.bottom + 17, "text-anchor": "middle" }, spec.x.tick(v)));
    }
    svg.append(s("line", { class: "frame", x1: margin.left, x2: width - margin.right, y1: height - margin.bottom, y2: height - margin.bottom }),
      s("text", { class: "axis", x: width - margin.right, y: height - 6, "text-anchor": "end" }, spec.x.label));
    const body = s("g", { "clip-path": `url(#${clip})` });
    svg.append(body);
    const fits = (p) => known(p.x) && known(p.y) && (!spec.x.log || p.x > 0) && (!spec.y.log || p.y > 0);
    const drawn = [];
    for (const series of spec.series) {
      const points = series.points.filter(fits).map((p) => ({ ...p, series, px: px(p.x), py: py(p.y) }));
      if (!points.length) continue;
      drawn.push(...points);
      const group = s("g", { class: "series", "data-group": series.group, "--own": series.own });
      const banded = points.filter((p) => known(p.lo) && known(p.hi) && p.hi > p.lo);
      if (banded.length > 1) {
        const floor = spec.y.log ? ys[0] : -Infinity;
        const edge = (list, end) => list.map((p) => `${p.px.toFixed(1)},${py(Math.max(p[end], floor)).toFixed(1)}`).join("L");
        group.append(s("path", { class: "band", d: `M${edge(banded, "hi")}L${edge([...banded].reverse(), "lo")}Z` }));
      }
      group.append(s("path", { class: series.thin ? "curve thin" : "curve", "stroke-dasharray": series.dash, d: `M${points.map((p) => `${p.px.toFixed(1)},${p.py.toFixed(1)}`).join("L")}` }));
      if (series.marks !== false) {
        if (points.length <= (phone ? 12 : 40)) for (const p of points.slice(0, -1)) group.append(s("circle", { class: "dot", r: 2.6, cx: p.px, cy: p.py }));
        const end = points[points.length - 1];
        group.append(s("circle", { class: "dot", r: 4.5, cx: end.px, cy: end.py }));
      }
      body.append(group);
    }
    if (spec.front && spec.front.length) {
      let path = "";
      spec.front.forEach((p, i) => { path += i ? `H${px(p.x).toFixed(1)}V${py(p.y).toFixed(1)}` : `M${px(p.x).toFixed(1)},${py(p.y).toFixed(1)}`; });
      const best = spec.front[spec.front.length - 1];
      const rightmost = Math.max(...drawn.map((p) => p.px), px(best.x));
      body.append(s("path", { class: "front", d: `${path}H${rightmost.toFixed(1)}` }));
      // A ring where the front passes to another method, and at its best point.
      spec.front.forEach((p, i) => {
        const next = spec.front[i + 1];
        if (!next || next.group !== p.group) body.append(s("circle", { class: "ring", r: 7, cx: px(p.x), cy: py(p.y) }));
      });
    }
    const cross = s("g", {}), brush = s("rect", { class: "zoom", visibility: "hidden" });
    svg.append(cross, brush);
    const tip = h("div", { class: "tip", hidden: true });
    host.replaceChildren(svg, tip);
    if (zoom) host.append(h("button", { class: "reset", type: "button", onclick: () => { delete chosen.zoom[id]; render(); } }, "whole picture"));

    const hide = () => { cross.replaceChildren(); tip.hidden = true; };
    const inside = (p) => p.px >= margin.left - 4 && p.px <= width - margin.right + 4 && p.py >= margin.top - 5 && p.py <= height - margin.bottom + 5;
    function hover(event) {
      const box = svg.getBoundingClientRect(), mx = event.clientX - box.left, my = event.clientY - box.top;
      const near = drawn.filter(inside);
      if (!near.length) return;
      let best = near[0], least = Infinity;
      for (const p of near) {
        const d = spec.nearest ? (p.px - mx) ** 2 + (p.py - my) ** 2 : Math.abs(p.px - mx);
        if (d < least) { least = d; best = p; }
      }
      const picked = spec.nearest ? [best] : spec.series.flatMap((series) => {
        const own = near.filter((p) => p.series === series);
        if (!own.length) return [];
        const p = own.reduce((a, b) => (Math.abs(b.px - best.px) < Math.abs(a.px - best.px) ? b : a));
        return Math.abs(p.px - best.px) <= 12 ? [p] : [];
      });
      cross.replaceChildren(s("line", { class: "cross", x1: best.px, x2: best.px, y1: margin.top, y2: height - margin.bottom }),
        ...picked.map((p) => s("circle", { class: "at", r: 4.5, cx: p.px, cy: p.py, "--own": p.series.own })));
      showTip(host, tip, best.px, spec.nearest ? best.py : Math.min(my, height - 60), spec.tip(best, picked));
    }
    let start = null;
    svg.addEventListener("pointermove", (event) => {
      if (start && event.pointerType === "mouse") {
        const box = svg.getBoundingClientRect(), mx = event.clientX - box.left, my = event.clientY - box.top;
        if (Math.abs(mx - start.x) + Math.abs(my - start.y) > 6) {
          hide();
          fill(brush, { x: Math.min(mx, start.x), y: Math.min(my, start.y), width: Math.abs(mx - start.x), height: Math.abs(my - start.y), visibility: "visible" }, []);
          return;
        }
      }
      hover(event);
    });
    svg.addEventListener("pointerdown", (event) => {
      hover(event);
      const box = svg.getBoundingClientRect();
      if (event.pointerType === "mouse" && event.button === 0) {
        start = { x: event.clientX - box.left, y: event.clientY - box.top };
        svg.setPointerCapture(event.pointerId);
      }
    });
    svg.addEventListener("pointerup", (event) => {
      if (!start) return;
      const box = svg.getBoundingClientRect(), from = start;
      const keep = (v, low, high) => Math.max(low, Math.min(high, v));
      const to = { x: keep(event.clientX - box.left, margin.left, width - margin.right), y: keep(event.clientY - box.top, margin.top, height - margin.bottom) };
      start = null;
      brush.setAttribute("visibility", "hidden");
      from.x = keep(from.x, margin.left, width - margin.right); from.y = keep(from.y, margin.top, height - margin.bottom);
      if (Math.abs(to.x - from.x) < 12 || Math.abs(to.y - from.y) < 12) return;
      chosen.zoom[id] = {
        x: [px.back(Math.min(from.x, to.x)), px.back(Math.max(from.x, to.x))],
        y: [py.back(Math.max(from.y, to.y)), py.back(Math.min(from.y, to.y))],
      };
      render();
    });
    svg.addEventListener("pointerleave", () => { if (!start) hide(); });
    svg.addEventListener("dblclick", () => { delete chosen.zoom[id]; render(); });
  }

  // --- cards -----------------------------------------------------------------------------------------------------
  const cards = {};
  function card(id, title, { wide = false } = {}) {
    if (!cards[id]) {
      const tools = h("div", {}), body = h("div", {});
      const element = h("section", { class: wide ? "card wide" : "card", id, "aria-labelledby": `${id}-title` },
        h("div", { class: "top" }, h("h2", { id: `${id}-title` }, title), tools), body);
      byId("main").append(element);
      cards[id] = { element, tools, body };
    }
    return cards[id];
  }
  // A card's parts stay where they are when it is drawn again, so that nothing jumps while somebody reads.
  function part(parent, name, make) {
    let found = [...parent.children].find((child) => child.dataset.part === name);
    if (!found) { found = make(); found.dataset.part = name; parent.append(found); }
    return found;
  }
  const plotIn = (body, name = "plot") => part(body, name, () => h("div", { class: "plot" }));
  const noteIn = (body, name, ...text) => part(body, name, () => h("p", { class: "note" })).replaceChildren(...text.flat().filter((t) => t !== ""));
  const choice = (options, value, pick) => h("div", { class: "choice", role: "group" }, options.map(([name, label]) =>
    h("button", { type: "button", "aria-pressed": String(name === value), "data-value": name, onclick: () => { pick(name); render(); } }, label)));
  const pickList = (options, value, pick, label) => h("select", { "aria-label": label, onchange: (event) => { pick(event.target.value); render(); } },
    options.map(([name, text]) => h("option", { value: name, selected: String(name) === String(value) }, text)));

  const axisOf = (name) => (isLoss(name)
    ? { label: WORDS[name] || name, tick: plain, floor: 0 }
    : { label: `accuracy, ${WORDS[name] || name}`, tick: (v) => `${Number((100 * v).toPrecision(6))} %`, floor: 0, ceiling: 1.005 });
  const groupsShown = () => data.groups.map((_, i) => i).filter(visible);
  const lines = (name, x) => groupsShown().map((group) => ({ group, own: colour(group), dash: dash(group), name: key(group), points: curve(group, name, x) }));

  function frontOf(series, loss) {
    const points = series.flatMap((each) => each.points.map((p) => ({ ...p, group: each.group }))).filter((p) => p.x > 0)
      .sort((a, b) => a.x - b.x || (loss ? a.y - b.y : b.y - a.y));
    const front = [];
    for (const p of points) if (!front.length || (loss ? p.y < front[front.length - 1].y : p.y > front[front.length - 1].y)) front.push(p);
    return front;
  }
  function budgets(front) {
    if (front.length < 2) return [];
    const low = front[0].x, high = front[front.length - 1].x;
    let found = logTicks(low, high, 6).filter((v) => v >= low && v <= high);
    if (found.length > 5) found = found.filter((v) => Number.isInteger(Number(Math.log10(v).toFixed(9))));
    return found.map((budget) => ({ budget, best: front.filter((p) => p.x <= budget).pop() }));
  }
  const WAYS = { total: "bytes both ways", up: "bytes up", down: "bytes down" };

  function drawTradeOff() {
    const name = chosen.figure, loss = isLoss(name);
    const { tools, body, element } = card("trade-off", loss ? "Loss against bytes" : "Accuracy against bytes", { wide: true });
    element.hidden = !name;
    if (!name) return;
    tools.replaceChildren(
      choice(figures().map((f) => [f, WORDS[f]]), name, (f) => { chosen.figure = f; chosen.zoom = {}; }),
      choice([["total", "both ways"], ["up", "up"], ["down", "down"]], chosen.way, (w) => { chosen.way = w; delete chosen.zoom["trade-off"]; }));
    const series = lines(name, byBytes), front = frontOf(series, loss), format = formatOf(name);
    const onFront = new Set(front.map((p) => `${p.group}/${p.round}`));
    plot(plotIn(body), "trade-off", {
      x: { label: `${WAYS[chosen.way]}, all clients together`, tick: tickBytes, log: true }, y: axisOf(name), series, front, nearest: true, height: 430,
      tip: (p) => [row(p.series.own, p.series.name, format(p.y)), p.std === null ? "" : h("div", {}, h("span", {}, ofSeeds(p, p.series.group)), h("b", {}, `± ${format(p.std)}`)),
        row(null, `${WAYS[chosen.way]}`, bytes(p.x)), row(null, "up, down", `${bytes(p.up)}, ${bytes(p.down)}`), row(null, "round", count(p.round)),
        onFront.has(`${p.series.group}/${p.round}`) ? h("div", {}, "on the Pareto front") : ""].filter(Boolean),
    });
    const several = data.runs.length > data.groups.length;
    noteIn(body, "note", "Dotted: the Pareto front, the best that so many bytes have bought; rings: where it passes to another method. ",
      several ? "Lines are means over seeds, bands one standard deviation. " : "", "Drag to look closer.");
    const rows = budgets(front);
    noteIn(body, "budget", rows.length ? "Best for a budget of " : "", rows.flatMap(({ budget, best }, i) =>
      [i ? " · " : "", `${tickBytes(budget)}: `, h("b", {}, key(best.group)), ` ${format(best.y)}`]));
  }

  const roundsTip = (format, head) => (best, picked) => [h("div", {}, head ? head(best) : `round ${count(best.round)}`),
    ...[...picked].sort((a, b) => b.y - a.y).map((p) => row(p.series.own, p.series.name, format(p.y) + (p.std ? ` ± ${format(p.std)}` : "")))];

  function drawRounds() {
    const name = chosen.figure;
    const { body, element } = card("rounds", isLoss(name) ? "Loss against rounds" : "Accuracy against rounds");
    element.hidden = !name;
    if (!name) return;
    plot(plotIn(body), "rounds", { x: { label: "round", tick: count }, y: axisOf(name), series: lines(name, byRound), height: 300, tip: roundsTip(formatOf(name)) });
    const every = Math.max(1, ...data.runs.map((run) => run.evaluations.every));
    noteIn(body, "note", EXPLAINED[name], every > 1 ? `; of long runs every ${every}th evaluation and the last are shown.` : ".");
  }

  function traffic(group, way) {
    const at = new Map();
    for (const run of runsOf(group)) run.traffic.round.forEach((round, i) => {
      if (!at.has(round)) at.set(round, []);
      at.get(round).push(run.traffic[way][i]);
    });
    const width = Math.max(...runsOf(group).map((run) => run.traffic.width));
    return [...at].sort((a, b) => a[0] - b[0]).map(([round, values]) => ({ round, x: round, y: mean(values), std: null, lo: null, hi: null, seeds: values.length, width }));
  }
  function drawTraffic() {
    const { body, element } = card("traffic", "Bytes per round");
    element.hidden = !data.runs.some((run) => run.traffic.round.length);
    if (element.hidden) return;
    const series = groupsShown().flatMap((group) => [["up", null, false], ["down", "5 4", true]].map(([way, line, thin]) =>
      ({ group, own: colour(group), dash: line, thin, marks: false, name: `${key(group)} ${way}`, points: traffic(group, way) })));
    plot(plotIn(body), "traffic", { x: { label: "round", tick: count }, y: { label: "bytes per round", tick: tickBytes, log: true }, series, height: 300,
      tip: roundsTip(bytes, (p) => (p.width > 1 ? `mean of rounds ${count(Math.max(1, p.round - p.width + 1))}–${count(p.round)}` : `round ${count(p.round)}`)) });
    const width = Math.max(1, ...data.runs.map((run) => run.traffic.width));
    noteIn(body, "note", "Lengths of all messages of a round; solid: up, dashed: down.", width > 1 ? ` Each point is the mean of ${width} rounds.` : "");
  }

  // --- clients ---------------------------------------------------------------------------------------------------
  const spreadName = () => ["local_accuracy", "local_loss"].find((name) => data.runs.some((run) => (run.evaluations.figures[`${name}_worst_decile`] || []).some(known)));
  function drawClients() {
    const name = spreadName();
    const over = card("clients", "The worst tenth of clients"), boxes = card("spread", "Spread over clients");
    over.element.hidden = boxes.element.hidden = !name;
    if (!name) return;
    const format = formatOf(name);
    const series = lines(`${name}_worst_decile`, byRound).flatMap((each) => [each, { ...each, thin: true, dash: "2 4", marks: false, name: `${each.name}, all clients`,
      points: curve(each.group, name, byRound).map((p) => ({ ...p, lo: null, hi: null })) }]);
    plot(plotIn(over.body), "clients", { x: { label: "round", tick: count }, y: axisOf(`${name}_worst_decile`), series, height: 300, tip: roundsTip(format) });
    noteIn(over.body, "note", "Each client’s model on the client’s own test data. Solid: the mean over the worst tenth of clients; dotted: over all.");
    drawBoxes(plotIn(boxes.body), name, format);
    noteIn(boxes.body, "note", "At the last evaluation: from the worst client to the best (line), 10–90 % (pale), 25–75 % (strong), the median (gap) and the mean of the worst tenth (diamond).");
  }
  function drawBoxes(host, name, format) {
    const found = groupsShown().map((group) => {
      const at = {};
      for (const q of ["p0", "p10", "p25", "p50", "p75", "p90", "p100", "worst_decile"]) {
        const values = runsOf(group).map((run) => last(run, `${name}_${q}`)).filter(known);
        at[q] = values.length ? mean(values) : null;
      }
      return { group, at, seeds: runsOf(group).length };
    }).filter(({ at }) => known(at.p50));
    const width = host.clientWidth;
    if (!width) return;
    const line = 40, top = 6, bottom = 40, left = 6, height = top + bottom + line * Math.max(1, found.length);
    const [low, high] = isLoss(name) ? extent({ floor: 0 }, found.flatMap(({ at }) => Object.values(at))) : [0, 1];
    const axis = axisOf(name), px = scale({}, low, high, left + 2, width - 12);
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "spread over clients" });
    for (const v of linearTicks(low, high, Math.max(2, Math.floor(width / 90)))) {
      svg.append(s("line", { class: "grid", x1: px(v), x2: px(v), y1: top, y2: height - bottom }), s("text", { x: px(v), y: height - bottom + 17, "text-anchor": v === low ? "start" : v === high ? "end" : "middle" }, axis.tick(v)));
    }
    svg.append(s("text", { class: "axis", x: width - 12, y: height - 6, "text-anchor": "end" }, axis.label));
    found.forEach(({ group, at }, i) => {
      const y = top + line * i + 27, bar = (a, b, high, opacity) => s("rect", { x: Math.min(px(a), px(b)), width: Math.max(1, Math.abs(px(b) - px(a))), y: y - high / 2, height: high, rx: 2, fill: "var(--own)", "fill-opacity": opacity });
      const d = px(at.worst_decile);
      svg.append(s("g", { class: "series", "data-group": group, "--own": colour(group) },
        s("text", { x: left, y: y - 12 }, key(group)),
        bar(at.p0, at.p100, 1.5, 0.8), bar(at.p10, at.p90, 10, 0.3), bar(at.p25, at.p75, 10, 0.75),
        s("rect", { x: px(at.p50) - 1.5, width: 3, y: y - 6, height: 12, fill: "var(--card)" }),
        s("path", { d: `M${d},${y - 6}l5,6l-5,6l-5,-6z`, fill: "var(--card)", stroke: "var(--own)", "stroke-width": 1.8 })));
    });
    const tip = h("div", { class: "tip", hidden: true });
    const hover = (event) => {
      const box = svg.getBoundingClientRect(), my = event.clientY - box.top, which = found[Math.floor((my - top) / line)];
      if (!which) { tip.hidden = true; return; }
      const { at, group, seeds } = which;
      showTip(host, tip, event.clientX - box.left, my + 20, [row(colour(group), key(group), ""), row(null, "worst tenth, mean", format(at.worst_decile)), row(null, "worst, best client", `${format(isLoss(name) ? at.p100 : at.p0)}, ${format(isLoss(name) ? at.p0 : at.p100)}`),
        row(null, "10 %, 90 %", `${format(at.p10)}, ${format(at.p90)}`), row(null, "25 %, 75 %", `${format(at.p25)}, ${format(at.p75)}`), row(null, "median", format(at.p50)), seeds > 1 ? h("div", {}, `means over ${seeds} seeds`) : ""].filter(Boolean));
    };
    svg.addEventListener("pointermove", hover);
    svg.addEventListener("pointerdown", hover);
    svg.addEventListener("pointerleave", () => { tip.hidden = true; });
    host.replaceChildren(svg, tip);
  }

  // --- sparsity --------------------------------------------------------------------------------------------------
  function drawSparsity() {
    const sparse = (run) => Object.keys(run.evaluations.figures).filter((name) => name === "sparsity" || name.startsWith("sparsity/"));
    const groups = data.groups.map((_, i) => i).filter((group) => runsOf(group).some((run) => sparse(run).length));
    const { tools, body, element } = card("sparsity", "Sparsity by layer", { wide: false });
    element.hidden = !groups.length;
    if (!groups.length) return;
    // Unless another is chosen, the one in which most happens.
    const change = (g) => { const ys = curve(g, "sparsity", byRound).map((p) => p.y); return ys.length ? Math.max(...ys) - Math.min(...ys) : 0; };
    if (!groups.some((group) => key(group) === chosen.sparse)) chosen.sparse = key(groups.reduce((a, b) => (change(b) > change(a) ? b : a)));
    const group = groups.find((g) => key(g) === chosen.sparse);
    tools.replaceChildren(groups.length > 1 ? pickList(groups.map((g) => [key(g), key(g)]), chosen.sparse, (v) => { chosen.sparse = v; delete chosen.zoom.sparsity; }, "method") : h("span", { class: "note" }, key(group)));
    const names = [...new Set(runsOf(group).flatMap(sparse))], layers = names.filter((name) => name !== "sparsity");
    // In the order in which the method names its layers: first to last.
    const own = (i) => (layers.length <= 8 ? colour(i) : `color-mix(in oklab, var(--c0), var(--c1) ${Math.round((100 * i) / (layers.length - 1))}%)`);
    const all = [...layers.map((name, i) => ({ name, label: name.slice("sparsity/".length), own: own(i) })), ...(names.includes("sparsity") ? [{ name: "sparsity", label: "all", own: "var(--ink)" }] : [])];
    const shown = all.filter(({ name }) => !chosen.layersOff.has(name));
    plot(plotIn(body), "sparsity", { x: { label: "round", tick: count }, y: { label: "share that is gone", tick: (v) => percent(v, 0), floor: 0, ceiling: 1.005, fromZero: true },
      series: shown.map(({ name, label, own: c }) => ({ group: `layer-${label}`, own: c, name: label, thin: name !== "sparsity", points: curve(group, name, byRound) })), height: 300, tip: roundsTip(percent) });
    part(body, "layers", () => h("div", { class: "layers" })).replaceChildren(...all.map(({ name, label, own: c }) =>
      h("button", { class: "chip", type: "button", "--own": c, "aria-pressed": String(!chosen.layersOff.has(name)), onclick: () => { toggle(chosen.layersOff, name); render(); } }, h("i", {}), h("span", {}, label))));
    noteIn(body, "note", "Share of a layer’s parameters that are gone from the server’s model: cut off, or 0.");
  }

  // --- the data split --------------------------------------------------------------------------------------------
  function drawSplit() {
    const { tools, body, element } = card("split", "Who has which labels");
    element.hidden = !data.splits.length;
    if (element.hidden) return;
    if (chosen.split >= data.splits.length) chosen.split = 0;
    const split = data.splits[chosen.split];
    const seeds = (i) => [...new Set(data.runs.filter((run) => run.split === i).map((run) => run.seed))].filter((v) => v !== null);
    tools.replaceChildren(data.splits.length > 1 ? pickList(data.splits.map((each, i) => [i, `${some(each.clients, "client")}, seed ${seeds(i).join(", ")}`]), chosen.split, (v) => { chosen.split = Number(v); }, "split") : "");
    const q = (list, i) => count(list[i]);
    const text = [`${some(split.clients, "client")}, ${some(split.total, "training example")}`, `: ${q(split.examples, 0)} to ${q(split.examples, 6)} each, ${q(split.examples, 3)} in the median`];
    if (split.table) text.push(`; ${q(split.labels, 0)} to ${q(split.labels, 6)} of ${count(split.classes)} labels each, ${q(split.labels, 3)} in the median. A client’s commonest label is ${percent(split.largest_share[3], 0)} of its examples in the median, ${percent(split.largest_share[5], 0)} for one client in ten or more.`);
    else text.push(".");
    if (split.table && split.table.length < split.clients) text.push(` Shown: ${some(split.table.length, "client")}, evenly chosen.`);
    const host = plotIn(body);
    noteIn(body, "note", text.join(""));
    host.hidden = !split.table;
    if (!split.table || !host.clientWidth) return;
    const width = host.clientWidth, columns = split.table.length, rows = split.table[0].length, wideLabels = split.labels_per_column;
    const margin = { left: 34, right: 8, top: 6, bottom: 38 }, cellW = (width - margin.left - margin.right) / columns;
    const cellH = Math.max(3, Math.min(22, 250 / rows)), height = margin.top + margin.bottom + rows * cellH;
    const most = Math.max(1, ...split.table.map((r) => Math.max(...r))), LEVELS = 9;
    // One path per shade: a heat map of thousands of cells is ten elements.
    const paths = Array(LEVELS + 1).fill("");
    split.table.forEach((counts, c) => counts.forEach((n, r) => {
      if (!n) return;
      const gap = cellW > 5 ? 0.8 : 0;
      paths[Math.max(1, Math.round(LEVELS * Math.sqrt(n / most)))] += `M${(margin.left + c * cellW).toFixed(2)},${(margin.top + r * cellH).toFixed(2)}h${(cellW - gap).toFixed(2)}v${(cellH - gap).toFixed(2)}h${(gap - cellW).toFixed(2)}z`;
    }));
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "labels per client" },
      paths.map((d, level) => d && s("path", { class: "cell", d, "fill-opacity": 0.08 + (0.92 * level) / LEVELS })));
    for (const v of linearTicks(0, rows - 1, Math.max(2, Math.min(rows - 1, 10))).filter(Number.isInteger)) {
      svg.append(s("text", { x: margin.left - 7, y: margin.top + (v + 0.5) * cellH + 4, "text-anchor": "end" }, String(v * wideLabels)));
    }
    for (const v of linearTicks(0, columns - 1, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger)) {
      svg.append(s("text", { x: margin.left + (v + 0.5) * cellW, y: height - margin.bottom + 17, "text-anchor": "middle" }, count(split.table_clients[v])));
    }
    svg.append(s("text", { class: "axis", x: width - margin.right, y: height - 5, "text-anchor": "end" }, "client; stronger: more examples of a label"));
    const mark = s("rect", { class: "outline", visibility: "hidden", width: cellW, height: cellH }), tip = h("div", { class: "tip", hidden: true });
    svg.append(mark);
    const hide = () => { tip.hidden = true; mark.setAttribute("visibility", "hidden"); };
    const hover = (event) => {
      const box = svg.getBoundingClientRect(), c = Math.floor((event.clientX - box.left - margin.left) / cellW), r = Math.floor((event.clientY - box.top - margin.top) / cellH);
      if (c < 0 || r < 0 || c >= columns || r >= rows) { hide(); return; }
      fill(mark, { x: margin.left + c * cellW, y: margin.top + r * cellH, visibility: "visible" }, []);
      const name = wideLabels > 1 ? `labels ${r * wideLabels}–${Math.min(split.classes, (r + 1) * wideLabels) - 1}` : `label ${r}`;
      showTip(host, tip, event.clientX - box.left, event.clientY - box.top, [row(null, `client ${count(split.table_clients[c])}`, `${count(split.table[c].reduce((a, b) => a + b, 0))} in all`), row(null, name, count(split.table[c][r]))]);
    };
    svg.addEventListener("pointermove", hover);
    svg.addEventListener("pointerdown", hover);
    svg.addEventListener("pointerleave", hide);
    host.replaceChildren(svg, tip);
  }

  // --- tables ----------------------------------------------------------------------------------------------------
  const COLUMNS = [
    ["accuracy", (run) => last(run, "global_accuracy"), percent, 1], ["local", (run) => last(run, "local_accuracy"), percent, 1],
    ["worst tenth", (run) => last(run, "local_accuracy_worst_decile"), percent, 1], ["new", (run) => run.totals.new_accuracy, percent, 1], ["newcomer", (run) => last(run, "newcomer_accuracy"), percent, 1],
    ["loss", (run) => (known(last(run, "global_accuracy")) ? null : last(run, "global_loss")), plain, -1],
    ["up", (run) => run.totals.up, bytes, -1], ["down", (run) => run.totals.down, bytes, -1], ["both", (run) => run.totals.up + run.totals.down, bytes, -1],
    ["bits/param. up", (run) => run.totals.bits_per_parameter_up, plain, -1], ["bits/param. down", (run) => run.totals.bits_per_parameter_down, plain, -1],
    ["sparsity", (run) => run.totals.sparsity ?? last(run, "sparsity"), percent, 0], ["model", (run) => run.totals.model_bytes, bytes, -1],
    ["refused", (run) => run.totals.rejected || null, count, 0], ["rounds given up", (run) => run.totals.abandoned || null, count, 0], ["time", (run) => run.totals.seconds, duration, 0],
  ];
  function drawTable() {
    const { body, element } = card("summary", "In figures", { wide: true });
    element.hidden = !data.groups.length;
    const columns = COLUMNS.filter(([, value]) => data.runs.some((run) => known(value(run))));
    const cells = data.groups.map((_, group) => columns.map(([, value]) => runsOf(group).map(value).filter(known)));
    const best = columns.map(([, , format, sign], c) => {
      const means = cells.map((each) => each[c]).filter((v) => v.length).map(mean);
      return sign && means.length > 1 ? format(sign > 0 ? Math.max(...means) : Math.min(...means)) : null;
    });
    const rows = data.groups.map((group, i) => {
      const runs = runsOf(i), seeds = runs.map((run) => run.seed).filter((v) => v !== null);
      const waiting = runs.filter((run) => run.state !== "finished");
      const sub = [runs.length > 1 ? `${runs.length} seeds: ${seeds.join(", ")}` : `${runs[0].name}${seeds.length ? `, seed ${seeds[0]}` : ""}`];
      if (waiting.length) sub.unshift(waiting.map((run) => `${run.state} at round ${run.round} of ${run.rounds}`)[0] + (waiting.length > 1 ? ` and ${waiting.length - 1} more` : ""));
      return h("tr", { class: visible(i) ? "" : "off" }, h("td", { "--own": colour(i) }, h("i", {}), group.label, h("small", { title: runs.map((run) => run.name).join(", ") }, sub.join(" · "))),
        columns.map(([, , format], c) => {
          const values = cells[i][c], std = spread(values);
          const text = values.length ? format(mean(values)) : "–";
          return h("td", { class: text === best[c] ? "best" : "" }, text, std !== null && format === percent ? h("small", {}, ` ±${(100 * std).toFixed(1)}`) : "");
        }));
    });
    const table = h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "method"), columns.map(([label]) => h("th", {}, label)))), h("tbody", {}, rows));
    part(body, "table", () => h("div", { class: "scroll", tabindex: 0 })).replaceChildren(table);
    const params = [...new Set(data.runs.map((run) => run.totals.parameters).filter(known))];
    noteIn(body, "note", "At the last evaluation; bytes are lengths of real messages, headers included. ", data.runs.length > data.groups.length ? "Means over seeds ± one standard deviation. " : "", params.length === 1 ? `The model has ${count(params[0])} parameters.` : "");
  }
  function drawSettings() {
    const { body, element } = card("settings", "What was different", { wide: true });
    element.hidden = data.groups.length < 2 || !data.different.length;
    const has = (name) => data.groups.filter((group) => group.settings[name] !== null && group.settings[name] !== undefined);
    const value = (v) => (v === null || v === undefined ? "–" : String(v));
    const shared = data.different.filter((name) => has(name).length > 1), own = data.different.filter((name) => has(name).length === 1);
    const table = (head, rows) => h("table", { class: "settings" }, head ? h("thead", {}, h("tr", {}, head.map((text) => h("th", {}, text)))) : "", h("tbody", {}, rows));
    part(body, "table", () => h("div", { class: "scroll", tabindex: 0 })).replaceChildren(table(["setting", ...data.groups.map((group) => group.label)],
      shared.map((name) => h("tr", {}, h("td", {}, name), data.groups.map((group) => h("td", {}, value(group.settings[name])))))));
    // Settings that only one of them has say more in a line each than in a table of dashes.
    const ownBy = data.groups.filter((group) => own.some((name) => has(name)[0] === group));
    const more = h("details", { open: chosen.open.has(" own") }, h("summary", {}, `${some(own.length, "setting")} that only one of them has`),
      h("div", { class: "inside" }, ownBy.map((group) => h("p", {}, h("b", {}, group.label), ": ", own.filter((name) => has(name)[0] === group).map((name) => `${name.split(".").slice(1).join(".")} = ${value(group.settings[name])}`).join(", ")))));
    more.addEventListener("toggle", () => { if (more.open) chosen.open.add(" own"); else chosen.open.delete(" own"); });
    part(body, "own", () => h("div", {})).replaceChildren(own.length ? more : "");
    noteIn(body, "note", "Everything else is the same but for seeds; all settings stand with each run below.");
  }
  function code(text) {
    const pre = h("pre", {}, text);
    const copy = h("button", { type: "button", onclick: async () => {
      try { await navigator.clipboard.writeText(text); copy.textContent = "copied"; } catch { getSelection().selectAllChildren(pre); copy.textContent = "selected"; }
      setTimeout(() => { copy.textContent = "copy"; }, 1500);
    } }, "copy");
    return h("div", { class: "code" }, pre, copy);
  }
  function drawRuns() {
    const { body, element } = card("runs", live ? "Runs" : "To repeat it", { wide: true });
    element.hidden = !data.runs.length && !data.unreadable.length;
    const list = data.runs.map((run) => {
      const accuracy = last(run, "global_accuracy"), said = [known(accuracy) ? percent(accuracy) : "", bytes(run.totals.up + run.totals.down), duration(run.totals.seconds)].filter(Boolean).join(" · ");
      const versions = Object.entries(run.versions).map(([name, v]) => `${name} ${v}`).join(", ");
      const details = h("details", { "data-run": run.name, open: chosen.open.has(run.name) },
        h("summary", {}, h("span", { class: "who" }, run.name), h("span", { class: `state ${run.state}` }, run.state),
          run.state === "finished" ? "" : h("span", { class: "bar", "--own": colour(run.group) }, h("b", {})),
          h("span", { class: "what" }, `${key(run.group)} · round ${count(run.round)} of ${count(run.rounds)} · ${said}`)),
        h("div", { class: "inside" },
          run.command ? [h("p", {}, "With the run’s folder at hand (or the settings below saved as a file):"), code(run.command)] : h("p", {}, "Made from Python with lc.fit: repeat it there with the objects and the seed that these settings name."),
          run.totals.state_sha256 ? h("p", {}, "The same result has the state hash ", h("b", {}, run.totals.state_sha256), ".") : "",
          h("p", {}, "Settings, all of them:"), code(run.toml), versions ? h("p", {}, `Made with ${versions}.`) : ""));
      const bar = details.querySelector(".bar b");
      if (bar) bar.style.width = `${(100 * run.round) / Math.max(1, run.rounds)}%`;
      details.addEventListener("toggle", () => { if (details.open) chosen.open.add(run.name); else chosen.open.delete(run.name); });
      return details;
    });
    part(body, "list", () => h("div", {})).replaceChildren(...list, ...data.unreadable.map(({ name, reason }) => h("p", { class: "note" }, h("b", {}, name), `: ${reason}`)));
  }

  // --- the whole page --------------------------------------------------------------------------------------------
  function toggle(set, value) { if (set.has(value)) set.delete(value); else set.add(value); }
  function drawLegend() {
    byId("legend").replaceChildren(...(data.groups.length > 1 ? data.groups.map((group, i) => {
      const focus = (on) => {
        document.body.classList.toggle("focused", on && visible(i));
        for (const element of document.querySelectorAll(".series")) element.classList.toggle("focus", on && element.dataset.group === String(i));
      };
      return h("button", { class: "chip", type: "button", "--own": colour(i), "aria-pressed": String(visible(i)), title: "click: show or hide; double click: only this",
        onclick: () => { toggle(chosen.off, group.label); render(); },
        ondblclick: () => { chosen.off = new Set(data.groups.map((g) => g.label).filter((label) => label !== group.label)); render(); },
        onmouseenter: () => focus(true), onmouseleave: () => focus(false) }, h("i", {}), h("span", {}, group.label));
    }) : []));
  }
  function drawHeader() {
    const first = data.runs[0], seeds = new Set(data.runs.map((run) => run.seed)).size, going = data.runs.filter((run) => run.state === "running").length;
    byId("title").textContent = document.title = data.title || "laconic";
    const split = data.splits[0], words = [];
    if (first) {
      words.push(some(data.runs.length, "run"));
      if (seeds > 1) words.push(some(seeds, "seed"));
      words.push([...new Set(data.runs.map((run) => run.model))].join(", "));
      if (split) words.push(some(split.clients, "client"));
      words.push(`${count(Math.max(...data.runs.map((run) => run.rounds)))} rounds`);
      if (going) words.push(`${going} running`);
    }
    byId("subtitle").textContent = words.join(" · ");
    byId("footer").textContent = data.made ? `Made with laconic ${data.laconic}, ${data.made.replace("T", " ").replace("+00:00", " UTC")}.` : "";
  }
  let pending = 0;
  function render() {
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(() => {
      document.body.classList.remove("focused");
      if (!figures().includes(chosen.figure)) chosen.figure = figures()[0] || null;
      drawHeader(); drawLegend();
      if (live) drawRuns();
      drawTradeOff(); drawTable(); drawRounds(); drawTraffic(); drawClients(); drawSparsity(); drawSplit(); drawSettings();
      if (!live) drawRuns();
      // Where an odd number of small cards is shown, the last takes the whole width.
      const small = ["rounds", "traffic", "clients", "spread", "sparsity", "split"].map((id) => cards[id].element).filter((e) => !e.hidden);
      small.forEach((e, i) => { const alone = small.length % 2 === 1 && i === small.length - 1; if (e.classList.contains("wide") !== alone) { e.classList.toggle("wide", alone); render(); } });
      part(byId("main"), "empty", () => h("p", { class: "empty wide" }, "No run has left anything here yet.")).hidden = data.runs.length + data.unreadable.length > 0;
      document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn || 0) + 1);
    });
  }

  const SUN = "M12 7a5 5 0 1 0 0 10a5 5 0 0 0 0-10M12 1v3M12 20v3M1 12h3M20 12h3M4.2 4.2l2.1 2.1M17.7 17.7l2.1 2.1M4.2 19.8l2.1-2.1M17.7 6.3l2.1-2.1";
  const MOON = "M20.5 14.2A8.5 8.5 0 0 1 9.8 3.5a8.5 8.5 0 1 0 10.7 10.7z";
  const store = { get: () => { try { return localStorage.getItem("laconic-theme"); } catch { return null; } }, set: (v) => { try { localStorage.setItem("laconic-theme", v); } catch { /* a page from a file may not remember */ } } };
  function theme(name) {
    document.documentElement.dataset.theme = name;
    byId("theme").replaceChildren(s("svg", { viewBox: "0 0 24 24", fill: "none", stroke: "currentColor", "stroke-width": 2, "stroke-linecap": "round", "stroke-linejoin": "round" }, s("path", { d: name === "dark" ? SUN : MOON })));
  }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  theme(store.get() || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => { if (!store.get()) theme(dark.matches ? "dark" : "light"); });
  byId("theme").addEventListener("click", () => { const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; store.set(next); theme(next); });

  let width = 0;
  new ResizeObserver(() => { if (document.body.clientWidth !== width) { width = document.body.clientWidth; render(); } }).observe(document.body);

  if (live) {
    const said = byId("live");
    let tag = "";
    said.hidden = false;
    async function poll() {
      try {
        if (!document.hidden) {
          const answer = await fetch("runs.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
          if (answer.status === 200) { tag = answer.headers.get("ETag") || ""; data = await answer.json(); render(); }
          said.textContent = data.runs.some((run) => run.state === "running") ? "live" : "nothing is running";
        }
      } catch { said.textContent = "no longer connected"; }
      setTimeout(poll, 2000);
    }
    poll();
  } else {
    data = JSON.parse(byId("data").textContent);
    render();
  }
})();
