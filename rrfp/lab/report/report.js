"use strict";
// Times are milliseconds. On the axes they count from the start of the chosen step of their run, so that two runs that
// are compared begin at one place.

const $ = id => document.getElementById(id);
const PX = () => window.devicePixelRatio || 1;

/** What is chosen: the part of time that is shown, and a task. By run: the chosen step and row. */
const state = { from: 0, to: 1, step: [], row: [], picked: null, hovered: null };
let data, runs, theme = {};
const plots = [], timelines = [], followers = []; // followers: panels that depend on the time shown, a step or a row

// Reading.

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

function spans(start, gaps, lengths, perMs) {
  const first = new Float64Array(gaps.length), last = new Float64Array(gaps.length);
  let at = start;
  for (let i = 0; i < gaps.length; i++) {
    first[i] = (at += gaps[i]) / perMs;
    last[i] = (at += lengths[i]) / perMs;
  }
  return { start: first, end: last };
}

const digits = text => Uint8Array.from(text, c => c.charCodeAt(0) - 48);

function readRun(raw, index, perMs) {
  const steps = raw.steps.map(step => ({
    ...step,
    start: step.start / perMs,
    end: step.end / perMs,
    rows: step.stages.map(own => {
      const tasks = spans(step.start, own.gap, own.length, perMs);
      Object.assign(tasks, { kind: digits(own.kind), m: own.microbatch, v: own.virtual, bytes: own.bytes });
      const waits = spans(step.start, own.waitGap, own.waitLength, perMs);
      waits.cause = digits(own.cause);
      const levels = { time: spans(step.start, own.levelGap, own.levelGap.map(() => 0), perMs).start, held: own.held };
      return { tasks, waits, levels, parts: own.parts.map(part => part / perMs) };
    }),
    messages: step.messages.map(sent => ({ ...sent, kind: digits(sent.kind), latency: sent.latency.map(t => t / perMs) })),
  }));
  return { ...raw, index, steps, label: `${raw.file}: ${raw.name}` };
}

// Words.

function time(ms) {
  const size = Math.abs(ms);
  if (size >= 1e4) return `${(ms / 1e3).toFixed(2)} s`;
  if (size < 1e-5) return "0 ms";
  if (size >= 1) return `${ms.toFixed(size >= 100 ? 1 : 2)} ms`;
  return `${(ms * 1e3).toFixed(size >= 0.01 ? 1 : 2)} µs`;
}

/** The unit of an axis that shows `span` milliseconds: its name, and how many of it a millisecond is. */
function unit(span) {
  return span >= 2e4 ? ["s", 1e-3] : span >= 0.5 ? ["ms", 1] : ["µs", 1e3];
}

const percent = share => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`;
const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
const plain = value => `${+value.toPrecision(6)}`;

function taskName(run, task) {
  const name = run.names[task.v];
  return `${data.kinds[task.kind].name}${task.m}@${task.v}${name ? ` (${name})` : ""}`;
}

/** The task at a place: `{s, row, i}` are its step, row and number there. */
function taskAt(run, { s, row, i }) {
  const { tasks } = run.steps[s].rows[row];
  return { s, row, i, kind: tasks.kind[i], m: tasks.m[i], v: tasks.v[i], start: tasks.start[i], end: tasks.end[i],
    bytes: tasks.bytes ? tasks.bytes[i] : 0 };
}

function findTask(run, s, kind, m, v) {
  for (let row = 0; row < run.stages.length; row++) {
    const { tasks } = run.steps[s].rows[row];
    for (let i = 0; i < tasks.v.length; i++)
      if (tasks.m[i] === m && tasks.v[i] === v && tasks.kind[i] === kind) return taskAt(run, { s, row, i });
  }
  return null;
}

function latencyOf(run, task, row) {
  const from = run.stages[task.row], to = run.stages[row];
  const sent = run.steps[task.s].messages.find(each => each.edge[0] === from && each.edge[1] === to);
  if (!sent) return null;
  for (let i = 0; i < sent.latency.length; i++)
    if (sent.microbatch[i] === task.m && sent.virtual[i] === task.v && sent.kind[i] === task.kind) return sent.latency[i];
  return null;
}

/** The tasks whose outputs a task reads: each with its latency (null: not recorded), and when it was there. */
function inputsOf(run, task) {
  return ((run.inputs[task.kind] || [])[task.v] || [])
    .map(([kind, v]) => findTask(run, task.s, kind, task.m, v))
    .filter(made => made)
    .map(made => {
      const latency = made.row === task.row ? 0 : latencyOf(run, made, task.row);
      return { made, latency, ready: made.end + (latency || 0) };
    })
    .sort((a, b) => b.ready - a.ready);
}

/** The idle time of a row between two times, by cause. */
function idleBetween(run, s, row, from, to) {
  const { waits } = run.steps[s].rows[row], found = new Map();
  for (let i = bisect(waits.end, from); i < waits.start.length && waits.start[i] < to; i++) {
    const length = Math.min(waits.end[i], to) - Math.max(waits.start[i], from);
    if (length > 0) found.set(waits.cause[i], (found.get(waits.cause[i]) || 0) + length);
  }
  return [...found].sort((a, b) => b[1] - a[1]);
}

function heldAt(run, s, row, at) {
  const { time, held } = run.steps[s].rows[row].levels;
  const next = bisect(time, at);
  return next ? held[next - 1] : 0;
}

const slotsOf = (run, s, row) => (run.steps[s].slots || run.slots)[row];

/** What a task is, and why it began when it did: a head and sentences. */
function tell(run, task) {
  const step = run.steps[task.s], stage = run.stages[task.row], { tasks } = step.rows[task.row];
  let head = `${taskName(run, task)}: ${data.kinds[task.kind].label} of microbatch ${task.m} on stage ${stage}, step ${step.number}`;
  const lines = [`Began at ${time(task.start - step.start)}, took ${time(task.end - task.start)}`
    + (step.sizes ? `, size ${plain(step.sizes[task.m])}` : "")
    + (task.bytes ? `, left ${(task.bytes / 2 ** 20).toFixed(1)} MiB held` : "") + "."];
  let free = step.start, before = -1;
  for (let i = Math.max(0, task.i - 3); i < task.i; i++) if (tasks.end[i] >= free) { free = tasks.end[i]; before = i; }
  const idle = idleBetween(run, task.s, task.row, free, task.start);
  const [last] = inputsOf(run, task);
  if (idle.length)
    lines.push(`Before it the stage was idle: ${idle.map(([cause, ms]) => `${time(ms)} ${data.causes[cause].label}`).join(", ")}.`);
  else if (before >= 0)
    lines.push(`It followed ${taskName(run, taskAt(run, { ...task, i: before }))} without a wait`
      + (task.start - free > 1e-3 ? `, ${time(task.start - free)} later.` : "."));
  if (idle.some(([cause]) => data.causes[cause].hatch === "memory")) {
    const slots = slotsOf(run, task.s, task.row), held = heldAt(run, task.s, task.row, (free + task.start) / 2);
    lines.push(`The limit blocked a forward: the stage held ${held}${slots ? ` of ${slots}` : ""} chunk tasks.`);
  }
  if (last) {
    const from = last.made.row === task.row ? "" : ` of stage ${run.stages[last.made.row]}`;
    const by = last.made.row === task.row ? "" : last.latency === null ? "; when its message came is not recorded"
      : `, and its message took ${time(last.latency)}`;
    lines.push(`Its last input was ${taskName(run, last.made)}${from}: that ended at ${time(last.made.end - step.start)}${by}.`);
    const rest = task.start - last.ready;
    if (rest > 0.02 * (task.end - task.start) && last.latency !== null) {
      let others = 0;
      for (let i = 0; i < task.i; i++) if (tasks.end[i] > last.ready) others++;
      lines.push(`It was ready ${time(rest)} before it began${others ? `; the stage ran ${count(others, "other task")} meanwhile` : ""}.`);
    }
  } else if (data.kinds[task.kind].name === "F") lines.push("It reads the step's inputs, which are there from the start.");
  return { head, lines, inputs: last ? [last] : [] };
}

function tellWait(run, s, row, i) {
  const step = run.steps[s], { waits, tasks } = step.rows[row], cause = data.causes[waits.cause[i]];
  const lines = [`From ${time(waits.start[i] - step.start)} for ${time(waits.end[i] - waits.start[i])}.`];
  const next = bisect(tasks.start, waits.end[i] - 1e-6);
  if (next < tasks.start.length) lines.push(`The next task was ${taskName(run, taskAt(run, { s, row, i: next }))}.`);
  return { head: `Idle, ${cause.label}: stage ${run.stages[row]}, step ${step.number}`, lines, inputs: [] };
}

/** The first index whose value is above `value`. */
function bisect(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1; else high = middle;
  }
  return low;
}

// Colours.

const channels = colour => [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));

function mix(one, other, part) {
  const a = channels(one), b = channels(other);
  return "#" + a.map((x, i) => Math.round(x + (b[i] - x) * part).toString(16).padStart(2, "0")).join("");
}

/** Draws the pattern of a cause on a tile of 8 x 8. */
const HATCHES = {
  memory: tile => { for (const x of [-8, 0, 8]) { tile.moveTo(x, 8); tile.lineTo(x + 8, 0); } },
  choice: tile => { for (const x of [-8, 0, 8]) { tile.moveTo(x, 0); tile.lineTo(x + 8, 8); } },
  order: tile => { tile.moveTo(0, 0); tile.lineTo(8, 8); tile.moveTo(0, 8); tile.lineTo(8, 0); },
  drained: tile => { tile.rect(1.5, 1.5, 1, 1); tile.rect(5.5, 5.5, 1, 1); },
};

function readTheme() {
  const css = getComputedStyle(document.documentElement), name = of => css.getPropertyValue(of).trim();
  theme = { ground: name("--ground"), text: name("--text"), muted: name("--muted"), line: name("--line"), accent: name("--accent") };
  const isDark = document.documentElement.dataset.theme === "dark";
  theme.causes = data.causes.map(({ face, ink, hatch }) => {
    const ground = isDark ? mix(theme.ground, hatch === "input" ? "#dfe3e9" : ink, 0.24) : face, draw = HATCHES[hatch];
    const line = isDark ? mix(theme.ground, ink, 0.85) : ink;
    if (!draw) return { fill: ground, flat: ground };
    const tile = document.createElement("canvas"), size = 8 * PX();
    tile.width = tile.height = Math.round(size);
    const on = tile.getContext("2d");
    on.fillStyle = ground;
    on.fillRect(0, 0, size, size);
    on.scale(size / 8, size / 8);
    on.strokeStyle = line;
    on.lineWidth = 1.2;
    on.beginPath();
    draw(on);
    on.stroke();
    return { fill: on.createPattern(tile, "repeat"), flat: mix(ground, line, 0.25) };
  });
}

function kindColour(run, kind, v) {
  const shades = Math.max(1, run.parts.length || 1 + Math.max(0, ...run.shades));
  return mix(data.kinds[kind].colour, "#ffffff", 0.5 * (run.shades[v] || 0) / Math.max(1, shades - 1));
}

/** By run: the colours of its tasks, and which one each (kind, virtual stage) has. */
function palette(run) {
  if (run.palette) return run.palette;
  const colours = [], of = data.kinds.map((_, kind) => run.shades.map((_, v) => {
    const colour = kindColour(run, kind, v);
    if (!colours.includes(colour)) colours.push(colour);
    return colours.indexOf(colour);
  }));
  return run.palette = { colours, of };
}

const ink = colour => {
  const [r, g, b] = channels(colour).map(value => (value / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.3 ? "#ffffff" : "#1b1f24";
};

// Timelines.

const ROW = rows => rows <= 8 ? 34 : rows <= 16 ? 24 : rows <= 32 ? 16 : 10;
/** The part of a row that a box fills; the pixels of a span, in the mean, below which a row is drawn by pixels. */
const FILL = 0.84, CROWDED = 3;

/** The axes beside timelines; panels on the same time leave as much room, so that one moment is below the other. */
const LEFT = 68, RIGHT = 48, BESIDE = { padding: [8, 12 + RIGHT, 0, 4] };

/** The time at a place of a timeline, by what is chosen: the plot follows a frame later. */
const timeAt = (u, left) => state.from + left / u.over.clientWidth * (state.to - state.from);

const originOf = run => run.steps[state.step[run.index]].start;

function axis(more) {
  return { stroke: () => theme.muted, grid: { stroke: () => theme.line, width: 1 }, ticks: { show: false }, gap: 4,
    font: '12px system-ui, "DejaVu Sans", sans-serif', ...more };
}

function timeAxis(run) {
  return axis({
    values: (u, splits) => {
      const [name, scale] = unit(state.to - state.from);
      return splits.map((at, i) => plain(at * scale) + (i === splits.length - 1 ? ` ${name}` : ""));
    },
    size: 26, space: 70,
  });
}

const cursor = () => ({ drag: { x: false, y: false, setScale: false }, points: { show: false }, y: false, sync: { key: "time" } });
const WHOLE = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
const shown = () => [state.from, state.to];

function plot(host, options, rows) {
  const u = new uPlot({ width: Math.max(200, host.clientWidth), legend: { show: false }, padding: [8, 12, 0, 4], ...options }, rows, host);
  plots.push(u);
  new ResizeObserver(() => {
    const width = Math.max(200, host.clientWidth);
    if (width !== u.width) u.setSize({ width, height: u.height });
  }).observe(host);
  return u;
}

function makeTimeline(run, host) {
  const rows = run.stages.length, height = ROW(rows), every = Math.ceil(14 / height);
  const splits = () => run.stages.map((_, row) => row).filter(row => row % every === 0);
  const idle = row => {
    const parts = run.steps[state.step[run.index]].rows[row].parts, all = parts.reduce((sum, part) => sum + part, 0);
    return all ? percent(1 - parts[0] / all) : "";
  };
  const u = plot(host, {
    height: rows * height + 36,
    cursor: cursor(),
    scales: { x: { time: false, range: shown }, y: { dir: -1, range: () => [-0.5, rows - 0.5] } },
    axes: [
      timeAxis(run),
      axis({ splits, values: (_, at) => at.map(row => `stage ${run.stages[row]}`), size: LEFT, grid: { show: false } }),
      axis({ scale: "y", side: 1, splits, values: (_, at) => at.map(idle), size: RIGHT, grid: { show: false } }),
    ],
    series: [{}, { paths: () => null, points: { show: false } }],
    hooks: { draw: [drawSpans], setSize: [placeOverlay] },
  }, [[0, 1], [null, null]]);
  const overlay = document.createElement("canvas");
  overlay.className = "overlay";
  u.root.querySelector(".u-wrap").append(overlay);
  const line = { run, u, host, overlay, rows, scratch: document.createElement("canvas") };
  u.line = line;
  timelines.push(line);
  placeOverlay(u);
  listen(line);
  return line;
}

function placeOverlay(u) {
  if (!u.line) return;
  const { overlay } = u.line, { left, top, width, height } = u.bbox;
  Object.assign(overlay, { width, height });
  Object.assign(overlay.style, { left: `${left / PX()}px`, top: `${top / PX()}px`, width: `${width / PX()}px`, height: `${height / PX()}px` });
  mark(u.line);
}

function drawSpans(u) {
  if (!u.line) return;
  const { run, rows } = u.line, { ctx } = u, { left, top, width, height } = u.bbox;
  const origin = originOf(run), from = state.from + origin, to = state.to + origin, scale = width / (to - from);
  const tall = height / rows, box = Math.max(1, tall * FILL), { colours, of } = palette(run);
  const boxes = colours.map(() => []), idle = theme.causes.map(() => []), thin = theme.causes.map(() => []), numbers = [], crowded = [];
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  for (let row = 0; row < rows; row++) {
    const y = top + row * tall + (tall - box) / 2;
    let crowd = 0;
    const parts = [];
    for (const step of run.steps) {
      if (step.end < from || step.start > to) continue;
      const { tasks, waits } = step.rows[row];
      const part = { tasks, waits, first: Math.max(0, bisect(tasks.start, from) - 2), wait: Math.max(0, bisect(waits.start, from) - 1),
        last: bisect(tasks.start, to), lastWait: bisect(waits.start, to) };
      crowd += part.last - part.first + part.lastWait - part.wait;
      parts.push(part);
    }
    if (crowd * CROWDED > width) { crowded.push({ parts, y, box }); continue; }
    for (const { tasks, waits, first, last, wait, lastWait } of parts) {
      for (let i = wait; i < lastWait; i++) {
        const x = left + (waits.start[i] - from) * scale, wide = (waits.end[i] - waits.start[i]) * scale;
        (wide < 3 ? thin : idle)[waits.cause[i]].push(x, y, wide);
      }
      for (let i = first; i < last; i++) {
        const x = left + (tasks.start[i] - from) * scale, wide = (tasks.end[i] - tasks.start[i]) * scale;
        const colour = of[tasks.kind[i]][tasks.v[i]];
        // A line of the ground between boxes that are wide enough.
        boxes[colour].push(x, y, wide > 4 ? wide - 1 : wide);
        if (wide > 16 * PX() && box >= 12 * PX()) numbers.push(x, wide, y, colours[colour], tasks.m[i]);
      }
    }
  }
  const fill = (style, list) => {
    if (!list.length) return;
    ctx.fillStyle = style;
    for (let i = 0; i < list.length; i += 3) ctx.fillRect(list[i], list[i + 1], list[i + 2], box);
  };
  theme.causes.forEach(({ fill: pattern, flat }, cause) => { fill(pattern, idle[cause]); fill(flat, thin[cause]); });
  colours.forEach((colour, i) => fill(colour, boxes[i]));
  drawCrowded(u, crowded, of, colours, from, scale);
  ctx.font = `${11 * PX()}px system-ui, "DejaVu Sans", sans-serif`;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  for (let i = 0; i < numbers.length; i += 5) {
    const [x, wide, y, colour, m] = numbers.slice(i, i + 5), low = Math.max(left, x), high = Math.min(left + width, x + wide);
    if (high - low < 9 * PX() * String(m).length) continue;
    ctx.fillStyle = ink(colour);
    ctx.fillText(m, (low + high) / 2, y + box / 2);
  }
  ctx.strokeStyle = theme.text;
  ctx.lineWidth = PX();
  for (const step of run.steps)
    for (const at of [step.start, step.end]) {
      const x = Math.round(left + (at - from) * scale) + 0.5;
      if (x < left || x > left + width) continue;
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
    }
  ctx.restore();
}

/** Rows whose boxes are a few pixels wide or less: each pixel is the mean of what it covers. */
function drawCrowded(u, crowded, of, colours, from, scale) {
  if (!crowded.length) return;
  const { ctx } = u, { left, width } = u.bbox, { scratch } = u.line, image = new ImageData(width, crowded.length);
  const rgb = [...colours, ...theme.causes.map(({ flat }) => flat)].map(channels), sums = new Float32Array(4 * width);
  const add = ([r, g, b], start, end) => {
    let low = Math.max(0, (start - from) * scale);
    const high = Math.min(width, (end - from) * scale);
    for (let x = Math.floor(low); x < high; x++) {
      const next = Math.min(x + 1, high), part = next - low;
      sums[4 * x] += r * part;
      sums[4 * x + 1] += g * part;
      sums[4 * x + 2] += b * part;
      sums[4 * x + 3] += part;
      low = next;
    }
  };
  crowded.forEach(({ parts }, line) => {
    sums.fill(0);
    for (const { tasks, waits, first, last, wait, lastWait } of parts) {
      for (let i = first; i < last; i++) add(rgb[of[tasks.kind[i]][tasks.v[i]]], tasks.start[i], tasks.end[i]);
      for (let i = wait; i < lastWait; i++) add(rgb[colours.length + waits.cause[i]], waits.start[i], waits.end[i]);
    }
    for (let x = 0, to = 4 * width * line; x < width; x++, to += 4) {
      const part = sums[4 * x + 3];
      if (part <= 0) continue;
      for (let c = 0; c < 3; c++) image.data[to + c] = sums[4 * x + c] / part;
      image.data[to + 3] = 255 * part;
    }
  });
  Object.assign(scratch, { width, height: crowded.length });
  scratch.getContext("2d").putImageData(image, 0, 0);
  ctx.imageSmoothingEnabled = false;
  crowded.forEach(({ y, box }, line) => ctx.drawImage(scratch, 0, line, width, 1, left, y, width, box));
}

/** Marks the chosen row and task, and whence the last input of the task came. */
function mark(line) {
  const { overlay, run, u, rows } = line, ctx = overlay.getContext("2d"), { width, height } = overlay;
  const scale = width / (state.to - state.from), from = state.from + originOf(run), tall = height / rows;
  ctx.clearRect(0, 0, width, height);
  ctx.strokeStyle = theme.accent;
  ctx.lineWidth = PX();
  ctx.setLineDash([3 * PX(), 3 * PX()]);
  ctx.strokeRect(-2, state.row[run.index] * tall + 0.5, width + 4, tall - 1);
  ctx.setLineDash([]);
  const seen = state.hovered || state.picked;
  if (!seen || seen.run !== run || seen.i === undefined) return;
  const task = taskAt(run, seen), middle = row => (row + 0.5) * tall, x = at => (at - from) * scale;
  ctx.strokeStyle = theme.text;
  ctx.lineWidth = 2 * PX();
  const outline = ({ start, end, row }) => ctx.strokeRect(x(start), row * tall + 1, Math.max(2, (end - start) * scale), tall - 2);
  outline(task);
  for (const { made } of tell(run, task).inputs) {
    outline(made);
    ctx.beginPath();
    ctx.moveTo(x(made.end), middle(made.row));
    ctx.lineTo(x(task.start), middle(task.row));
    ctx.stroke();
  }
}

/** What is at a point of a timeline, in CSS pixels of its plot: a task, else a wait, else a row. */
function hit(line, left, top) {
  const { run, u, rows } = line, at = timeAt(u, left) + originOf(run);
  const row = Math.max(0, Math.min(rows - 1, Math.floor(top / (u.bbox.height / PX()) * rows)));
  for (let s = 0; s < run.steps.length; s++) {
    const step = run.steps[s];
    if (at < step.start || at > step.end) continue;
    const { tasks, waits } = step.rows[row];
    for (let i = bisect(tasks.start, at) - 1, seen = 0; i >= 0 && seen < 3; i--, seen++)
      if (tasks.end[i] >= at) return { run, s, row, i };
    const wait = bisect(waits.start, at) - 1;
    if (wait >= 0 && waits.end[wait] >= at) return { run, s, row, wait };
    return { run, s, row };
  }
  return { run, row };
}

function tellOf(found) {
  if (found.i !== undefined) return tell(found.run, taskAt(found.run, found));
  return found.wait !== undefined ? tellWait(found.run, found.s, found.row, found.wait) : null;
}

function fillWith(host, told) {
  const head = document.createElement("strong");
  head.textContent = told.head;
  host.replaceChildren(head, document.createTextNode(told.lines.join(" ")));
}

function showTip(event, told) {
  const tip = $("tip");
  tip.hidden = !told;
  if (!told) return;
  fillWith(tip, told);
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18}px`;
}

function listen(line) {
  const { u, host, run } = line, { over } = u;
  let drag = null;
  const point = event => { const box = over.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  over.addEventListener("pointerdown", event => {
    if (event.button) return;
    const [x] = point(event);
    drag = { x, from: state.from, to: state.to, far: false, isZoom: event.shiftKey };
    over.setPointerCapture(event.pointerId);
    host.focus({ preventScroll: true });
  });
  over.addEventListener("pointermove", event => {
    const [x, y] = point(event);
    if (drag) {
      drag.far = drag.far || Math.abs(x - drag.x) > 3;
      if (!drag.far) return;
      showTip(event, null);
      if (drag.isZoom) u.setSelect({ left: Math.min(x, drag.x), width: Math.abs(x - drag.x), top: 0, height: over.clientHeight }, false);
      else { const by = (drag.x - x) * (drag.to - drag.from) / over.clientWidth; show(drag.from + by, drag.to + by); }
      return;
    }
    const found = hit(line, x, y), told = tellOf(found);
    state.hovered = told ? found : null;
    mark(line);
    showTip(event, told);
  });
  over.addEventListener("pointerup", event => {
    const [x, y] = point(event), ended = drag;
    drag = null;
    if (!ended) return;
    if (!ended.far) choose(hit(line, x, y));
    else if (ended.isZoom) {
      u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      show(...[ended.x, x].sort((a, b) => a - b).map(at => timeAt(u, at)));
    }
  });
  over.addEventListener("pointercancel", () => { drag = null; });
  over.addEventListener("pointerleave", () => {
    state.hovered = null;
    mark(line);
    $("tip").hidden = true;
  });
  over.addEventListener("dblclick", event => {
    const found = hit(line, ...point(event));
    if (found.s !== undefined) chooseStep(run, found.s);
  });
  over.addEventListener("wheel", event => {
    const isAlong = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (!isAlong && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const span = state.to - state.from, way = (isAlong && event.deltaX) || event.deltaY;
    if (isAlong) { const by = span * way / 1500; show(state.from + by, state.to + by); }
    else zoom(Math.exp(way / 400), timeAt(u, point(event)[0]));
  }, { passive: false });
  host.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const key = KEYS[event.key];
    if (!key) return;
    event.preventDefault();
    key(run);
  });
}

// Choosing what is shown.

let isDue = false, settling = 0;

/** Shows a part of time; panels follow when it stays. */
function show(from, to) {
  const [start, end] = bounds(), least = 1e-4;
  const span = Math.min(Math.max(to - from, least), (end - start) * 1.1);
  from = Math.min(Math.max(from, start - span * 0.5), end - span * 0.5);
  state.from = from;
  state.to = from + span;
  if (!isDue) { isDue = true; requestAnimationFrame(draw); }
}

function draw() {
  isDue = false;
  for (const { u } of timelines) u.redraw();
  for (const line of timelines) mark(line);
  clearTimeout(settling);
  settling = setTimeout(follow, 60);
}

function follow() { for (const update of followers) update(); }

/** From the first step to the last, counted from the chosen steps. */
function bounds() {
  const starts = runs.map(run => run.steps[0].start - originOf(run)), ends = runs.map(run => run.steps.at(-1).end - originOf(run));
  return [Math.min(...starts), Math.max(...ends)];
}

function zoom(by, at = (state.from + state.to) / 2) { show(at + (state.from - at) * by, at + (state.to - at) * by); }
function pan(part) { const by = part * (state.to - state.from); show(state.from + by, state.to + by); }

function whole() {
  const longest = Math.max(...runs.map(run => { const step = run.steps[state.step[run.index]]; return step.end - step.start; }));
  show(-0.01 * longest, 1.01 * longest);
}

function all() { const [from, to] = bounds(); show(from - 0.01 * (to - from), to + 0.01 * (to - from)); }

function chooseStep(run, s) {
  if (s < 0 || s >= run.steps.length) return;
  state.step[run.index] = s;
  const select = $(`step-${run.index}`);
  if (select) select.value = s;
  whole();
}

function chooseRow(run, row) {
  state.row[run.index] = Math.max(0, Math.min(run.stages.length - 1, row));
  timelines.forEach(mark);
  follow();
}

function choose(found) {
  state.picked = found && found.i !== undefined ? found : null;
  if (found && found.row !== undefined) state.row[found.run.index] = found.row;
  const told = found && tellOf(found);
  if (told) fillWith($("story"), told);
  timelines.forEach(mark);
  follow();
}

/** Chooses a task, and brings it into view. */
function go(found) {
  const task = taskAt(found.run, found), origin = originOf(found.run), from = task.start - origin, to = task.end - origin;
  if (from < state.from || to > state.to) { const half = (state.to - state.from) / 2; show((from + to) / 2 - half, (from + to) / 2 + half); }
  choose(found);
}

function neighbour(run, way) {
  const { picked } = state, row = state.row[run.index];
  if (picked && picked.run === run && picked.row === row) {
    const i = picked.i + way, { tasks } = run.steps[picked.s].rows[row];
    if (i >= 0 && i < tasks.start.length) return go({ ...picked, i });
    const s = picked.s + way;
    if (s < 0 || s >= run.steps.length) return;
    return go({ run, s, row, i: way > 0 ? 0 : run.steps[s].rows[row].tasks.start.length - 1 });
  }
  const s = state.step[run.index], { tasks } = run.steps[s].rows[row];
  if (tasks.start.length) go({ run, s, row, i: Math.min(tasks.start.length - 1, bisect(tasks.end, state.from + originOf(run))) });
}

function toInput(run) {
  const { picked } = state;
  if (!picked || picked.run !== run) return;
  const [last] = inputsOf(run, taskAt(run, picked));
  if (last) go({ run, s: last.made.s, row: last.made.row, i: last.made.i });
}

const KEYS = {
  "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "_": () => zoom(1 / 0.7),
  ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2),
  ArrowUp: run => chooseRow(run, state.row[run.index] - 1), ArrowDown: run => chooseRow(run, state.row[run.index] + 1),
  Home: whole, "0": whole, "9": all,
  n: run => chooseStep(run, state.step[run.index] + 1), p: run => chooseStep(run, state.step[run.index] - 1),
  ".": run => neighbour(run, 1), ",": run => neighbour(run, -1), i: toInput,
  Escape: () => choose(null),
};

// Panels. Each is made once for each run, the two of a pair beside each other, on scales that fit both.

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function section(title, note, make) {
  const whole = element("section"), pair = element("div", "", "pair");
  whole.append(element("h2", title), element("p", note, "note"), pair);
  $("panels").append(whole);
  for (const run of runs) {
    const host = element("div", "", "panel");
    if (runs.length > 1) host.append(element("h3", run.label));
    pair.append(host);
    make(run, host);
  }
}

const refuse = (host, text) => host.append(element("p", text));

function canvas(host) {
  const made = element("div");
  host.append(made);
  return made;
}

/** Of each interval, the share of the stages that is idle by each cause. */
function shares(run, from, to, bins) {
  const wide = (to - from) / bins, sums = data.causes.map(() => new Float64Array(bins)), inside = new Float64Array(bins);
  const add = (list, start, end, weight) => {
    let low = Math.max(0, (start - from) / wide);
    const high = Math.min(bins, (end - from) / wide);
    for (let bin = Math.floor(low); low < high; bin++) { const next = Math.min(bin + 1, high); list[bin] += (next - low) * weight; low = next; }
  };
  for (const step of run.steps) {
    if (step.end < from || step.start > to) continue;
    add(inside, step.start, step.end, 1);
    for (const { waits } of step.rows)
      for (let i = bisect(waits.end, from); i < waits.start.length && waits.start[i] < to; i++)
        add(sums[waits.cause[i]], waits.start[i], waits.end[i], 1 / run.stages.length);
  }
  return { sums, inside };
}

function idlePanel(run, host) {
  const bins = 240, count = data.causes.length;
  const readout = element("p", "", "readout");
  let latest = null;
  const u = plot(canvas(host), {
    height: 200, cursor: cursor(),
    scales: { x: { time: false, range: shown }, y: { range: () => [0, 1] } },
    ...BESIDE,
    axes: [timeAxis(run), axis({ values: (_, at) => at.map(percent), size: LEFT })],
    // Each series is the sum of the causes up to its own, so the largest is drawn first.
    series: [{}, ...data.causes.map((_, i) => ({ points: { show: false }, width: 1, stroke: () => theme.muted,
      fill: () => theme.causes[count - 1 - i].fill, paths: uPlot.paths.stepped({ align: 1 }) }))],
    hooks: { setCursor: [u => {
      const { idx } = u.cursor;
      if (!latest || idx == null || u.cursor.left < 0 || idx >= bins) { readout.textContent = ""; return; }
      const parts = data.causes.map((cause, i) => [cause.label, latest.sums[i][idx]]).filter(([, share]) => share > 0.001);
      readout.textContent = `${time(u.data[0][idx])}: ` + (parts.map(([label, share]) => `${label} ${percent(share)}`).join(", ") || "no stage is idle");
    }] },
  }, [[0, 1], ...data.causes.map(() => [0, 0])]);
  host.append(readout);
  followers.push(() => {
    const origin = originOf(run), wide = (state.to - state.from) / bins;
    latest = shares(run, state.from + origin, state.to + origin, bins);
    const edges = Array.from({ length: bins + 1 }, (_, i) => state.from + i * wide), floor = new Float64Array(bins + 1), stack = [];
    for (const sums of latest.sums) {
      for (let i = 0; i < bins; i++) floor[i] += sums[i];
      floor[bins] = floor[bins - 1];
      stack.unshift(Array.from(floor));
    }
    u.setData([edges, ...stack]);
  });
}

/** What a stage held at most, and its largest limit (null: none), by row. */
function peaksOf(run) {
  const held = run.stages.map((_, row) => Math.max(0, ...run.steps.map(step => highest(step.rows[row].levels.held))));
  const slots = run.stages.map((_, row) => Math.max(...run.steps.map((_, s) => slotsOf(run, s, row) || 0)) || null);
  return { held, slots, top: Math.max(1, ...held, ...slots) * 1.1 };
}

/** The largest of many values. */
const highest = values => values.reduce((most, value) => value > most ? value : most, 0);

function memoryPanel(run, host) {
  const { held: most, slots: limits } = peaksOf(run), top = Math.max(...runs.map(each => peaksOf(each).top));
  const head = element("p", "", "note"), number = at => at.map(value => Number.isInteger(value) ? value : "");
  host.append(head);
  const u = plot(canvas(host), {
    height: 180, cursor: cursor(),
    scales: { x: { time: false, range: shown }, y: { range: () => [0, top] } },
    ...BESIDE,
    axes: [timeAxis(run), axis({ size: LEFT, values: (_, at) => number(at) })],
    series: [{},
      { points: { show: false }, width: 1, stroke: () => theme.accent, fill: () => theme.accent + "44", paths: uPlot.paths.stepped({ align: 1 }) },
      { points: { show: false }, width: 2, dash: [6, 4], stroke: () => theme.text, paths: uPlot.paths.stepped({ align: 1 }) }],
  }, [[0, 1], [0, 0], [null, null]]);
  followers.push(() => {
    const row = state.row[run.index], origin = originOf(run), at = [], held = [], limit = [];
    run.steps.forEach((step, s) => {
      const { levels } = step.rows[row], slots = slotsOf(run, s, row);
      const add = (when, value) => { at.push(when - origin); held.push(value); limit.push(slots); };
      add(step.start, 0);
      levels.held.forEach((value, i) => add(Math.max(levels.time[i], at.at(-1) + origin), value));
      add(Math.max(step.end, at.at(-1) + origin), 0);
    });
    const slots = slotsOf(run, state.step[run.index], row);
    head.textContent = `Stage ${run.stages[row]} (choose one in the timeline): it held ${most[row]} chunk tasks at most`
      + (slots ? `, the limit is ${slots} (dashed).` : run.limit ? `; ${run.limit}.` : ".");
    u.setData([at, held, limit]);
  });
  host.append(element("p", `The most that each stage held${limits.some(Boolean) ? ", and its limit (line)" : ""}:`, "note"));
  const rows = run.stages.map((_, row) => row);
  plot(canvas(host), {
    height: 140, cursor: { show: false },
    scales: { x: { time: false, range: () => [-0.7, rows.length - 0.3] }, y: { range: () => [0, top] } },
    axes: [axis({ values: (_, at) => at.map(row => Number.isInteger(row) ? run.stages[row] ?? "" : ""), size: 26, incrs: WHOLE }),
      axis({ size: 48, values: (_, at) => number(at) })],
    series: [{},
      { points: { show: false }, width: 1, stroke: () => theme.accent, fill: () => theme.accent + "66", paths: uPlot.paths.bars({ size: [0.7, 60] }) },
      { paths: () => null, points: { show: false } }],
    hooks: { draw: [u => drawLines(u, theme.text, rows.map(row => {
      const slots = limits[row], x = at => u.valToPos(at, "x", true), y = u.valToPos(slots, "y", true);
      return slots && [x(row - 0.42), y, x(row + 0.42), y];
    }))] },
  }, [rows, most, limits]);
}

/** Draws lines in a plot: lists of four, or nothing. */
function drawLines({ ctx }, colour, lines) {
  ctx.save();
  ctx.strokeStyle = colour;
  ctx.lineWidth = 3 * PX();
  ctx.beginPath();
  for (const line of lines) if (line) { ctx.moveTo(line[0], line[1]); ctx.lineTo(line[2], line[3]); }
  ctx.stroke();
  ctx.restore();
}

function quantile(sorted, part) { return sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))]; }

/** By edge, its name and its latencies, ascending. */
function latenciesOf(run) {
  const edges = new Map();
  for (const step of run.steps)
    for (const { edge, latency } of step.messages) {
      const key = edge.join(" → ");
      if (!edges.has(key)) edges.set(key, { edge, all: [] });
      for (const each of latency) edges.get(key).all.push(each);
    }
  for (const { all } of edges.values()) all.sort((a, b) => a - b);
  return [...edges].sort((a, b) => a[1].edge[0] - b[1].edge[0] || a[1].edge[1] - b[1].edge[1]);
}

function latencyPanel(run, host) {
  const list = latenciesOf(run);
  if (!list.length) return refuse(host, "The trace has no message between stages with a time of arrival.");
  const of = part => list.map(([, { all }]) => quantile(all, part));
  const [low, middle, high] = [0.05, 0.5, 0.95].map(of), xs = list.map((_, i) => i);
  const top = Math.max(1e-3, ...runs.flatMap(each => latenciesOf(each).map(([, { all }]) => quantile(all, 0.95))));
  const [name, scale] = unit(top);
  const every = Math.ceil(list.length / 12);
  plot(canvas(host), {
    height: 200, cursor: { show: false },
    scales: { x: { time: false, range: () => [-0.7, list.length - 0.3] }, y: { range: () => [0, top * 1.08] } },
    axes: [axis({ splits: () => xs.filter(i => i % every === 0), values: (_, at) => at.map(i => list[i][0]), size: 26 }),
      axis({ size: 64, values: (_, at) => at.map(value => `${plain(value * scale)} ${name}`) })],
    series: [{}, { paths: () => null, stroke: () => theme.accent, points: { show: true, size: 8, fill: () => theme.accent } }],
    hooks: { drawAxes: [u => drawLines(u, theme.muted, xs.map(i => {
      const x = u.valToPos(i, "x", true), y = value => u.valToPos(value, "y", true);
      return [x, y(low[i]), x, y(high[i])];
    }))] },
  }, [xs, middle]);
  table(host, ["edge", "messages", "5%", "median", "95%", "most"],
    list.map(([key, { all }], i) => [key, all.length, time(low[i]), time(middle[i]), time(high[i]), time(all.at(-1))]));
}

/** Size (without sizes: number), kind and mean time of each microbatch in each step. */
function pointsOf(run) {
  const hasSizes = run.steps.some(step => step.sizes), points = [];
  for (const step of run.steps) {
    const sums = new Map();
    for (const { tasks } of step.rows)
      for (let i = 0; i < tasks.m.length; i++) {
        const key = tasks.m[i] * data.kinds.length + tasks.kind[i], sum = sums.get(key) || [0, 0];
        sum[0] += tasks.end[i] - tasks.start[i];
        sum[1]++;
        sums.set(key, sum);
      }
    for (const [key, [ms, count]] of sums) {
      const m = Math.floor(key / data.kinds.length);
      if (!hasSizes || step.sizes) points.push([hasSizes ? step.sizes[m] : m, key % data.kinds.length, ms / count]);
    }
  }
  return { hasSizes, points: points.sort((a, b) => a[0] - b[0]) };
}

function sizePanel(run, host) {
  const { hasSizes, points } = pointsOf(run);
  if (!points.length) return refuse(host, "The trace has no task.");
  const xs = points.map(([x]) => x), top = highest(runs.flatMap(each => pointsOf(each).points.map(([, , ms]) => ms)));
  const [name, scale] = unit(top);
  const kinds = data.kinds.map((kind, index) => ({ ...kind, index })).filter(({ index }) => points.some(point => point[1] === index));
  const low = xs[0], high = xs.at(-1), edge = Math.max(high - low, 1) * 0.03;
  plot(canvas(host), {
    height: 220, cursor: { show: false },
    scales: { x: { time: false, range: () => [low - edge, high + edge] }, y: { range: () => [0, top * 1.08] } },
    axes: [axis({ size: 26, values: (_, at) => at.map(plain), ...(hasSizes ? {} : { incrs: WHOLE }) }), axis({ size: 64, values: (_, at) => at.map(value => `${plain(value * scale)} ${name}`) })],
    series: [{}, ...kinds.map(({ colour }) => ({ paths: () => null, stroke: () => theme.text, width: 0.5,
      points: { show: true, size: 6, width: 0.5, stroke: () => theme.text, fill: colour } }))],
  }, [xs, ...kinds.map(({ index }) => points.map(([, kind, ms]) => kind === index ? ms : null))]);
  host.append(element("p", (hasSizes ? "Across: the size that the job gave (sizes=). " : "The job gave no sizes: across are the microbatches by number. ")
    + `Up: the mean time of its tasks over the stages; ${kinds.map(({ label }) => label).join(", ")} as in the timelines.`, "note"));
}

function table(host, heads, rows, words = []) {
  const details = element("details"), scroll = element("div", "", "scroll"), made = element("table");
  details.append(element("summary", "As a table"), scroll);
  scroll.append(made);
  fillTable(made, heads, rows, words);
  host.append(details);
  return made;
}

function fillTable(made, heads, rows, words = []) {
  const line = (tag, cells) => {
    const row = element("tr");
    row.append(...cells.map((cell, i) => cell instanceof Node ? cell : element(tag, cell, words.includes(i) ? "words" : "")));
    return row;
  };
  made.replaceChildren(line("th", heads), ...rows.map(cells => line("td", cells)));
}

function breakdownTable(run, host) {
  const made = table(host, [], []);
  followers.push(() => {
    const step = run.steps[state.step[run.index]], all = data.causes.map((_, i) => i + 1).filter(i => step.rows.some(({ parts }) => parts[i] > 0));
    fillTable(made, [`step ${step.number}`, "compute", ...all.map(i => data.causes[i - 1].label), "other", "most held"],
      step.rows.map(({ parts, levels }, row) => [`stage ${run.stages[row]}`, ...[0, ...all, data.causes.length + 1].map(i => time(parts[i])),
        Math.max(0, ...levels.held)]));
  });
}

function advicePanel(run, host) {
  const { advice } = run;
  if (advice.refusal) return refuse(host, advice.refusal);
  const around = ({ value, low, high }) => `${(100 * value).toFixed(1)} ± ${(100 * Math.max(high - value, value - low)).toFixed(1)}%`;
  host.append(element("p", `${advice.steps.length} steps, ${advice.method}. A step took ${time(advice.measured * 1e3)}; replayed on the engine `
    + `${time(advice.predicted * 1e3)} (${advice.ratio.toFixed(3)} of it).`));
  if (advice.doubt) host.append(element("p", `Doubtful, as it is off by more than 5%: ${advice.doubt}`));
  const listed = (title, heads, rows, words, none) => {
    host.append(element("h3", title));
    if (!rows.length) return host.append(element("p", none));
    const scroll = element("div", "", "scroll"), made = element("table");
    scroll.append(made);
    host.append(scroll);
    fillTable(made, heads, rows, words);
  };
  const bar = share => {
    const cell = element("td"), made = element("span", "", "bar");
    made.style.width = `${Math.max(0, 160 * share.value)}px`;
    cell.className = "words";
    cell.append(made);
    return cell;
  };
  const causes = advice.causes.filter(({ share }) => share.value >= 0.005);
  listed("Without one cause the step would be shorter by (shares overlap, and do not add up)", ["cause", "share", "", "how much of it"],
    causes.map(({ name, share, text }) => [name, around(share), bar(share), text]), [0, 2, 3], "No cause explains 0.5% of the step.");
  listed("Settings (gains overlap too; change one, and record again)", ["setting", "step shorter by", "why"],
    advice.settings.map(({ setting, saved, reason, is_bound }) => [setting.replace(/,$/, ""), (is_bound ? "at most " : "") + around(saved), reason]), [0, 2],
    "None that was tried makes the step clearly shorter.");
  if (advice.assumed.length) host.append(element("p", `Assumed: ${advice.assumed.join("; ")}.`, "note"));
}

// The page.

function swatch(fill) {
  const made = element("canvas"), wide = 26, high = 14;
  Object.assign(made, { width: wide * PX(), height: high * PX() });
  Object.assign(made.style, { width: `${wide}px`, height: `${high}px` });
  const ctx = made.getContext("2d");
  fill(ctx, made.width, made.height);
  return made;
}

function drawLegend() {
  const entries = [];
  data.kinds.forEach((kind, index) => {
    if (!runs.some(run => run.steps.some(step => step.rows.some(({ tasks }) => tasks.kind.includes(index))))) return;
    const shades = [...new Set(runs.flatMap(run => run.shades.map((_, v) => kindColour(run, index, v))))];
    const parts = runs.find(run => run.parts.length)?.parts;
    entries.push([swatch((ctx, wide, high) => shades.forEach((shade, i) => {
      ctx.fillStyle = shade;
      ctx.fillRect(i * wide / shades.length, 0, wide / shades.length, high);
    })), kind.label + (parts ? `: ${parts.join(", ")}` : shades.length > 1 ? " (paler: deeper chunks)" : "")]);
  });
  data.causes.forEach((cause, index) => {
    if (!runs.some(run => run.steps.some(step => step.rows.some(({ waits }) => waits.cause.includes(index))))) return;
    entries.push([swatch((ctx, wide, high) => { ctx.fillStyle = theme.causes[index].fill; ctx.fillRect(0, 0, wide, high); }), `idle: ${cause.label}`]);
  });
  entries.push([swatch(() => {}), "other: the runtime"]);
  $("legend").replaceChildren(...entries.map(([box, text]) => { const span = element("span"); span.append(box, element("span", text)); return span; }));
}

function runHead(run) {
  const head = element("div", "", "run-head"), steps = run.steps.filter(step => step.training);
  const mean = steps.length ? steps.reduce((sum, step) => sum + step.end - step.start, 0) / steps.length : 0;
  if (runs.length > 1) head.append(element("h3", run.label));
  const label = element("label", "Step "), select = element("select");
  select.id = `step-${run.index}`;
  run.steps.forEach((step, s) => {
    const option = element("option", `${step.number}${step.training ? "" : " (evaluation)"}: ${time(step.end - step.start)}`);
    option.value = s;
    select.append(option);
  });
  select.addEventListener("change", () => chooseStep(run, Number(select.value)));
  label.append(select);
  const more = run.recorded > run.steps.length ? ` of ${run.recorded}, the newest` : "";
  const others = run.others.length ? `; --run shows another: ${run.others.join(", ")}` : "";
  head.append(label, element("p", `${count(run.stages.length, "stage")}; ${run.method || "how it ran is not in the trace"}; ${count(run.steps.length, "step")}${more}`
    + (steps.length ? `, a training step takes ${time(mean)}` : "") + others));
  return head;
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
}

function repaint() {
  readTheme();
  drawLegend();
  for (const u of plots) u.redraw();
  timelines.forEach(mark);
}

/** The step of median length among the training steps, else among all. */
function typicalStep(run) {
  const training = run.steps.filter(step => step.training), steps = (training.length ? training : run.steps).slice();
  steps.sort((a, b) => a.end - a.start - (b.end - b.start));
  return run.steps.indexOf(steps[(steps.length - 1) >> 1]);
}

async function start() {
  data = await unpack($("data").textContent);
  runs = data.runs.map((raw, index) => readRun(raw, index, data.ticks / 1e3));
  for (const run of runs) { state.step.push(typicalStep(run)); state.row.push(0); }
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  setTheme(prefers.matches ? "dark" : "light");
  prefers.addEventListener("change", () => { setTheme(prefers.matches ? "dark" : "light"); repaint(); });
  $("theme").addEventListener("click", () => { setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); repaint(); });
  readTheme();
  const longest = Math.max(...runs.map(run => { const step = run.steps[state.step[run.index]]; return step.end - step.start; }));
  Object.assign(state, { from: -0.01 * longest, to: 1.01 * longest });
  $("main").hidden = false;
  drawLegend();
  uPlot.sync("time");
  for (const run of runs) {
    const host = element("div", "", "timeline");
    Object.assign(host, { tabIndex: 0 });
    host.setAttribute("role", "application");
    host.setAttribute("aria-label", `Timeline of ${run.label}: ${run.stages.length} stages, ${run.steps.length} steps. Keys are listed below it.`);
    $("timelines").append(runHead(run), host);
    $(`step-${run.index}`).value = state.step[run.index];
    makeTimeline(run, host);
  }
  section("Idle stages over time, by cause", "The part of the stages that runs no task, in the time that the timelines show; above it stages compute, or the runtime works.", (run, host) => { idlePanel(run, host); breakdownTable(run, host); });
  section("Memory", "Chunk tasks whose memory a stage holds, against its limit.", memoryPanel);
  section("Latency of messages, by edge", "From the end of the task that made a message to its arrival, over all steps: the dot is the median, the line goes from 5% to 95%.", latencyPanel);
  section("Time of microbatches against their size", "One dot for each microbatch, step and kind of task.", sizePanel);
  section("Advice", "What rrfp advise says: recorded steps replayed on the simulator's engine.", advicePanel);
  follow();
  const buttons = { "zoom-in": () => zoom(0.7), "zoom-out": () => zoom(1 / 0.7), left: () => pan(-0.2), right: () => pan(0.2), whole, all };
  for (const [id, press] of Object.entries(buttons)) $(id).addEventListener("click", press);
  $("status").remove();
}

/** For tests and for the console: what is shown, the tops of each panel's scales by run, and where a task is drawn. */
window.report = {
  state,
  scales: () => [...document.querySelectorAll(".pair")].map(pair => [...pair.children].map(
    host => plots.filter(u => host.contains(u.root)).map(u => u.scales.y.max).join())),
  locate(index, text, s = state.step[index]) {
    const run = runs[index], [, kind, m, v] = /^(\w)(\d+)@(\d+)$/.exec(text);
    const task = findTask(run, s, data.kinds.findIndex(each => each.name === kind), +m, +v), { u, rows } = timelines[index];
    const { left, top, width, height } = u.over.getBoundingClientRect(), origin = originOf(run);
    const x = at => left + (at - origin - state.from) / (state.to - state.from) * width;
    return { left: x(task.start), right: x(task.end), y: top + (task.row + 0.5) * height / rows };
  },
};

window.report.ready = start().catch(error => {
  $("status").textContent = `This page cannot show its trace: ${error}`;
  throw error;
});
