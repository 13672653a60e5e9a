// Memory over the step, stacked by kind, under the line that the GPU holds.

/** Shows a rank's memory; the timeline calls it. */
let choose = () => {};
function drawMemory() {
  const canvas = find("memory"), curves = memory.curves, top = 22, capacity = hardware.memory_bytes;
  const totals = curves.map(({ seconds, bytes }) =>
    seconds.map((_, at) => sum(Object.values(bytes).map((values) => values[at]))));
  const most = totals.reduce((most, values) => values.reduce((a, b) => Math.max(a, b), most), 0);
  const small = most < 0.1 * capacity, ceiling = small ? most * 1.2 || 1 : Math.max(most, capacity) * 1.08;
  let shown = 0;
  const redraw = chart(canvas, (width) => (width < 600 ? 220 : 280), (context, width, height) => {
    const left = gutter(width), bottom = height - 4, { rank, seconds, bytes } = curves[shown];
    const y = (value) => bottom - (bottom - top) * value / ceiling;
    const step = round(ceiling / 5);
    const label = (text, x, y, paint) => {
      context.fillStyle = colour("card");
      context.fillRect(x - 3, y - 8, context.measureText(text).width + 6, 15);
      context.fillStyle = colour(paint);
      context.fillText(text, x, y);
    };
    timeAxis(context, width, bottom);
    for (let mark = 0; mark < ceiling; mark += step) {
      context.fillStyle = colour("line");
      context.fillRect(left, y(mark), width - left, 1);
      context.fillStyle = colour("soft");
      context.fillText(inBytes(mark), 0, Math.min(y(mark), height - 8));
    }
    context.save();
    context.beginPath();
    context.rect(left, 0, width - left, height);
    context.clip();
    let floor = seconds.map(() => 0);
    const end = (at) => timeToX(seconds[at + 1] ?? length, width);
    for (const kind of Object.keys(bytes)) {
      const roof = floor.map((value, at) => value + bytes[kind][at]);
      context.fillStyle = colour(kindColour(kind));
      context.beginPath();
      roof.forEach((value, at) => {
        context.lineTo(timeToX(seconds[at], width), y(value));
        context.lineTo(end(at), y(value));
      });
      for (let at = floor.length - 1; at >= 0; at--) {
        context.lineTo(end(at), y(floor[at]));
        context.lineTo(timeToX(seconds[at], width), y(floor[at]));
      }
      context.fill();
      floor = roof;
    }
    const peak = memory.ranks.find((one) => one.rank === rank);
    if (peak) {
      const x = timeToX(peak.at_seconds, width), text = `peak ${inBytes(peak.peak_bytes)} at ${peak.at}`;
      context.fillStyle = colour("ink");
      context.beginPath();
      context.arc(x, y(peak.peak_bytes), 4, 0, 7);
      context.fill();
      const rightmost = width - context.measureText(text).width - 6;
      if (x >= left && x <= width) label(text, Math.min(x + 9, rightmost), y(peak.peak_bytes) - 11, "ink");
    }
    context.beginPath();
    context.moveTo(left, y(capacity));
    context.lineTo(width, y(capacity));
    for (const [paint, thick] of [["card", 5], ["ink", 2]]) {
      context.strokeStyle = colour(paint);
      context.lineWidth = thick;
      context.stroke();
    }
    const limit = `${hardware.name} holds ${inBytes(capacity)}${small ? ", far above" : ""}`;
    label(limit, left + 7, small ? top + 8 : y(capacity) + (y(capacity) - 10 < top ? 11 : -10), most > capacity ? "bad" : "ink");
    context.restore();
    cursorLine(context, width, height);
    canvas.dataset.rank = rank;
  });
  const at = (seconds) => Math.max(0, curves[shown].seconds.findLastIndex((start) => start <= seconds));
  const told = (event, seconds) => event.offsetX < gutter(canvas.clientWidth) ? "" : [
    `${inSeconds(seconds)}: ${inBytes(totals[shown][at(seconds)])}`,
    ...Object.entries(curves[shown].bytes).filter(([, values]) => values[at(seconds)])
      .map(([kind, values]) => `${kind} ${inBytes(values[at(seconds)])}`)].join("\n");
  zoomable(canvas, told, redraw);
  const select = find("curve");
  select.append(...curves.map((curve, index) => make("option", { value: index },
    `${curve.rank}: ${memory.ranks.find((one) => one.rank === curve.rank)?.place ?? ""}`)));
  choose = (rank) => {
    const found = curves.findIndex((curve) => curve.rank === rank);
    if (found < 0) return;
    shown = found;
    select.value = found;
    redraw();
  };
  select.addEventListener("change", () => choose(curves[select.value].rank));
  find("memory-legend").append(...KINDS.filter((kind) => curves.some((curve) => kind in curve.bytes))
    .map((kind) => swatch(kindColour(kind), kind)));
}
