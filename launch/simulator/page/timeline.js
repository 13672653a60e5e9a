// The timeline: a row for each kind of rank, computation above the lanes of its communication.

function drawTimeline() {
  const canvas = find("timeline"), rows = timeline.rows, top = 22, many = rows.length > 8;
  const [tall, thin, gap] = rows.length > 24 ? [12, 3, 6] : many ? [16, 5, 7] : [26, 7, 12];
  const high = tall + AXES.length * (thin + 1) + gap;
  const actions = rows.map((row) => row.compute.map(([, , action]) => parse(action)));
  let picked = null; // [row, index]

  const redraw = chart(canvas, () => top + rows.length * high, (context, width, height) => {
    const left = gutter(width);
    let blocks = 0;
    const span = ([start, end], y, size) => {
      const x = timeToX(start, width), right = timeToX(end, width);
      if (right < left || x > width) return null;
      blocks++;
      const edge = Math.max(left, x), wide = Math.max(0.75, Math.min(right, width + 1) - edge - (right - x > 3 ? 1 : 0));
      context.fillRect(edge, y, wide, size);
      return [edge, wide];
    };
    rows.forEach((row, at) => {
      const y = top + at * high;
      context.fillStyle = colour("idle");
      context.fillRect(left, y, width - left, tall);
      context.fillStyle = colour("ink");
      context.fillText(`rank ${row.rank}`, 0, y + (many ? 6 : 7));
      context.fillStyle = colour("soft");
      const alike = width < 600 ? `×${row.ranks}` : `${whole(row.ranks)} alike`;
      const slower = run.disturbed?.stragglers?.[row.rank];
      if (slower) context.fillStyle = colour("bad");
      if (slower) context.fillText(`${digits(slower)}× slower`, 0, y + (many ? 18 : 20));
      else if (row.ranks > 1) context.fillText(alike, 0, y + (many ? 18 : 20));
    });
    timeAxis(context, width, height);
    const paints = Object.fromEntries(["forward", "backward", "inputs", "weights", "phase"].map((name) => [name, colour(name)]));
    rows.forEach((row, at) => {
      const y = top + at * high;
      row.compute.forEach((part, index) => {
        const { paint, short, chunk } = actions[at][index];
        context.globalAlpha = run.virtual_stages > 1 ? 1 - 0.4 * chunk / (run.virtual_stages - 1) : 1;
        context.fillStyle = paints[paint];
        const drawn = span(part, y, tall);
        context.globalAlpha = 1;
        if (drawn && drawn[1] > 18) {
          const text = [part[2], short].find((text) => text && context.measureText(text).width < drawn[1] - 3);
          context.fillStyle = paint === "phase" ? "#16181d" : "#ffffff";
          if (text) context.fillText(text, drawn[0] + (drawn[1] - context.measureText(text).width) / 2, y + tall / 2 + 0.5);
        }
      });
      AXES.forEach((axis, lane) => {
        context.fillStyle = colour(axisColour(axis));
        for (const part of row.lanes[axis] ?? []) span(part, y + tall + 1 + lane * (thin + 1), thin);
      });
    });
    if (picked) {
      const [start, end] = rows[picked[0]].compute[picked[1]], x = timeToX(start, width);
      context.strokeStyle = colour("ink");
      context.lineWidth = 2;
      const edge = Math.max(x, left), wide = timeToX(end, width) - edge;
      if (wide > 0) context.strokeRect(edge, top + picked[0] * high, wide, tall);
    }
    cursorLine(context, width, height);
    canvas.dataset.rows = rows.length;
    canvas.dataset.blocks = blocks;
  });

  const when = ([start, end]) => `from ${inSeconds(start)} for ${inSeconds(end - start)}`;
  const who = (row) => `rank ${row.rank} (${row.place})`;
  const about = (row, index) => `${actions[row][index].text}\n${who(rows[row])}\n${when(rows[row].compute[index])}`;
  function hit(event, seconds) {
    const at = Math.floor((event.offsetY - top) / high), row = rows[at];
    if (!row) return "";
    if (event.offsetX < gutter(canvas.clientWidth)) return `${who(row)}\n${counted(row.ranks, "rank")} alike`;
    const inside = event.offsetY - top - at * high, slack = 2 * (view.to - view.from) / canvas.clientWidth;
    const over = ([start, end]) => start <= seconds && seconds < end;
    const near = ([start, end]) => start - slack <= seconds && seconds <= end + slack;
    if (inside < tall) {
      const index = row.compute.findIndex(over);
      return index < 0 ? `idle\n${who(row)}\nat ${inSeconds(seconds)}` : about(at, index);
    }
    const axis = AXES[Math.floor((inside - tall - 1) / (thin + 1))];
    const found = (row.lanes[axis] ?? []).find(over) ?? (row.lanes[axis] ?? []).find(near);
    return found ? `${axis} communication\n${who(row)}\n${when(found)}` : "";
  }
  zoomable(canvas, hit, redraw);
  canvas.addEventListener("click", (event) => {
    const row = rows[Math.floor((event.offsetY - top) / high)];
    if (row) choose(row.rank);
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.shiftKey || !["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(event.key)) return;
    event.preventDefault();
    let [row, index] = picked ?? [0, rows[0].compute.findIndex(([, end]) => end > view.from) - 1];
    if (event.key === "ArrowLeft") index--;
    if (event.key === "ArrowRight" || !picked) index++;
    if (picked && (event.key === "ArrowUp" || event.key === "ArrowDown")) {
      const start = rows[row].compute[index][0];
      row = Math.max(0, Math.min(rows.length - 1, row + (event.key === "ArrowDown" ? 1 : -1)));
      index = rows[row].compute.findIndex(([, end]) => end > start);
    }
    if (!rows[row].compute[index]) return;
    picked = [row, index];
    const [start, end] = rows[row].compute[index], wide = view.to - view.from;
    if (start < view.from || end > view.to) show((start + end - wide) / 2, (start + end + wide) / 2);
    find("timeline-says").textContent = about(row, index).replaceAll("\n", ", ");
    choose(rows[row].rank);
    redraw();
  });
  const lettered = actions.flat();
  find("timeline-legend").append(
    ...Object.entries({ forward: "forward", backward: "backward", inputs: "gradients of inputs", weights: "gradients of weights" })
      .filter(([paint]) => lettered.some((action) => action.paint === paint)).map(([paint, text]) => swatch(paint, text)),
    ...(lettered.some((action) => action.paint === "phase") ? [swatch("phase", "the step's end")] : []),
    ...AXES.map((axis) => swatch(axisColour(axis), `${axis} communication`)), swatch("idle", "idle"));
}
