// Canvases, the tooltip, and the stretch of time that timeline and memory both show.

const charts = [];
/** Draws sharply, and again when the window, the colours or the view change. */
function chart(canvas, heightFor, paint) {
  const context = canvas.getContext("2d");
  let asked = 0;
  const draw = () => {
    asked = 0;
    const width = canvas.clientWidth, height = heightFor(width), ratio = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    paint(context, width, height);
  };
  const redraw = () => { asked ||= requestAnimationFrame(draw); };
  draw();
  new ResizeObserver(redraw).observe(canvas);
  charts.push(redraw);
  return redraw;
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((redraw) => redraw()));

const tip = find("tip");
function showTip(text, x, y) {
  tip.style.visibility = text ? "visible" : "hidden";
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18}px`;
}
document.addEventListener("pointermove", (event) => {
  if (event.target.tagName !== "CANVAS") showTip(event.target.closest("[data-tip]")?.dataset.tip, event.clientX, event.clientY);
});

const length = Math.max(1e-9, ...timeline.rows.flatMap((row) => [row.compute, ...Object.values(row.lanes)])
  .map((spans) => spans.at(-1)?.[1] ?? 0));
const timed = []; // what draws the view
const redrawTimed = () => timed.forEach((redraw) => redraw());
const view = { from: 0, to: length, cursor: null };
const gutter = (width) => (width < 600 ? 54 : 96);
function show(from, to) {
  const wide = Math.min(length, Math.max(to - from, length * 1e-5));
  view.from = Math.max(0, Math.min(from, length - wide));
  view.to = view.from + wide;
  redrawTimed();
}
const zoom = (factor, around = (view.from + view.to) / 2) =>
  show(around - (around - view.from) * factor, around + (view.to - around) * factor);
const pan = (share) => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));
const timeToX = (seconds, width) => gutter(width) + (seconds - view.from) / (view.to - view.from) * (width - gutter(width));
const xToTime = (x, width) => view.from + (x - gutter(width)) / (width - gutter(width)) * (view.to - view.from);
const ACTS = { in: () => zoom(0.5), out: () => zoom(2), left: () => pan(-0.25), right: () => pan(0.25), all: () => show(0, length) };
find("zoom").addEventListener("click", (event) => ACTS[event.target.dataset.do]?.());

/** 1, 2 or 5 times a power of ten, at least `rough`. */
function round(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((times) => times * power >= rough) * power;
}
function timeAxis(context, width, height) {
  const step = round((view.to - view.from) / (width < 600 ? 4 : 9));
  const unit = view.to >= 1 ? [1, "s"] : view.to >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  const places = Math.max(0, -Math.floor(Math.log10(step / unit[0]) + 1e-9));
  context.strokeStyle = colour("line");
  context.fillStyle = colour("soft");
  context.lineWidth = 1;
  context.textAlign = "center";
  for (let tick = Math.ceil(view.from / step) * step; tick <= view.to; tick += step) {
    const x = Math.round(timeToX(tick, width)) + 0.5;
    context.beginPath();
    context.moveTo(x, 16);
    context.lineTo(x, height);
    context.stroke();
    if (x < width - 20) context.fillText(`${(tick / unit[0]).toFixed(places)} ${unit[1]}`, x, 8);
  }
  context.textAlign = "left";
}
function cursorLine(context, width, height) {
  if (view.cursor === null) return;
  const x = timeToX(view.cursor, width);
  context.fillStyle = colour("soft");
  if (x >= gutter(width)) context.fillRect(x, 16, 1, height);
}

/** Wheel, drag and pinch on a canvas whose x axis is the view; tell(event, seconds): what is there. A page scroll that passes over it goes on. */
let lastScroll = -1e9;
addEventListener("scroll", () => { lastScroll = performance.now(); }, { passive: true });
function zoomable(canvas, tell, redraw) {
  timed.push(redraw);
  const pointers = new Map();
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const all = view.to - view.from >= length;
    if (performance.now() - lastScroll < 250 || (all && (sideways || event.deltaY > 0))) return;
    event.preventDefault();
    if (sideways) pan((event.deltaX || event.deltaY) / canvas.clientWidth);
    else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.002))), xToTime(event.offsetX, canvas.clientWidth));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.offsetX);
    canvas.setPointerCapture(event.pointerId);
  });
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, (event) => pointers.delete(event.pointerId));
  }
  canvas.addEventListener("pointermove", (event) => {
    const width = canvas.clientWidth;
    if (pointers.has(event.pointerId)) {
      const before = [...pointers.values()];
      pointers.set(event.pointerId, event.offsetX);
      const now = [...pointers.values()];
      if (now.length > 1) {
        zoom(Math.abs(before[0] - before[1]) / Math.max(1, Math.abs(now[0] - now[1])), xToTime((now[0] + now[1]) / 2, width));
      } else {
        pan((before[0] - now[0]) / (width - gutter(width)));
      }
    }
    const seconds = xToTime(event.offsetX, width);
    view.cursor = event.offsetX >= gutter(width) ? seconds : null;
    showTip(tell(event, seconds), event.clientX, event.clientY);
    redrawTimed();
  });
  canvas.addEventListener("pointerleave", () => { view.cursor = null; showTip(""); redrawTimed(); });
  canvas.addEventListener("keydown", (event) => {
    const act = { "+": "in", "=": "in", "-": "out", 0: "all", Home: "all" }[event.key]
      ?? (event.shiftKey && { ArrowLeft: "left", ArrowRight: "right" }[event.key]);
    if (!act || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    ACTS[act]();
  });
}
