// The topology: a cell is a GPU, or a node, or several nodes: whatever fits
function drawTopology() {
  const canvas = find("topology"), world = topology.world_size, perNode = topology.gpus_per_node;
  const sizes = {}, strides = {};
  let stride = 1;
  for (const axis of topology.order.split("-")) {
    [sizes[axis], strides[axis]] = [topology[axis] ?? 1, stride];
    stride *= sizes[axis];
  }
  const axes = Object.keys(sizes).filter((axis) => sizes[axis] > 1);
  const named = { pp: "stage", dp: "replica", tp: "tensor rank", cp: "context rank" };
  const at = (rank, axis) => Math.floor(rank / strides[axis]) % sizes[axis];
  const hue = (place, size) => `oklch(0.66 0.13 ${Math.round(265 - (size > 1 ? 250 * place / (size - 1) : 0))})`;
  let by = axes.includes("pp") ? "pp" : axes.at(-1) ?? "pp";
  let chosen = -1, plan;

  /** Cells side by side: a multiple or a part of what repeats, so that like stands under like. */
  function aligned(most, period) {
    if (period <= most) return most - most % period;
    const parts = Math.ceil(period / most);
    return Number.isInteger(period) && period % parts === 0 ? period / parts : most;
  }
  const repeats = axes.length > 1 ? strides[axes.at(-1)] : 1; // ranks

  function arrange(width) {
    const limit = width < 500 ? 520 : 400, columns = perNode > 3 ? Math.ceil(perNode / 2) : perNode;
    const nodes = Math.ceil(world / perNode), lines = Math.ceil(perNode / columns);
    for (let size = 56; size >= 8; size--) {
      const label = size >= 18 ? 14 : 0, wide = columns * size + 10, high = lines * size + 10 + label;
      const across = aligned(Math.max(1, Math.floor(width / wide)), Math.max(1, repeats / perNode));
      if (wide <= width && Math.ceil(nodes / across) * high <= limit) {
        const place = (cell) => {
          const node = Math.floor(cell / perNode), inside = cell % perNode;
          return [(node % across) * wide + 3 + (inside % columns) * size,
            Math.floor(node / across) * high + 3 + label + Math.floor(inside / columns) * size];
        };
        return { size, place, each: 1, label, wide, high, across, nodes, cells: world, jump: across * perNode,
          height: Math.ceil(nodes / across) * high };
      }
    }
    for (let each = perNode; ; each *= 2) {
      const cells = Math.ceil(world / each);
      for (let size = 16; size >= 6; size--) {
        const across = aligned(Math.floor(width / size), Math.max(1, repeats / each)), height = Math.ceil(cells / across) * size;
        if (height <= limit) {
          return { size, each, cells, height, jump: across, nodes: 0,
            place: (cell) => [(cell % across) * size, Math.floor(cell / across) * size] };
        }
      }
    }
  }

  const redraw = chart(canvas, (width) => (plan = arrange(width)).height + 2, (context) => {
    const size = sizes[by] ?? 1;
    const paints = Array.from({ length: size }, (_, place) => hue(place, size));
    const inner = plan.size - (plan.size > 7 ? 2 : 1);
    context.strokeStyle = colour("line");
    context.fillStyle = colour("soft");
    for (let node = 0; node < plan.nodes; node++) {
      const x = (node % plan.across) * plan.wide, y = Math.floor(node / plan.across) * plan.high;
      context.strokeRect(x + 0.5, y + plan.label + 0.5, plan.wide - 5, plan.high - plan.label - 5);
      if (plan.label) context.fillText(`node ${node}`, x + 2, y + 7);
    }
    for (let cell = 0; cell < plan.cells; cell++) {
      const [x, y] = plan.place(cell), first = cell * plan.each, last = Math.min(first + plan.each, world);
      const places = new Set();
      for (let rank = first; rank < last && places.size < 8; rank++) places.add(by in sizes ? at(rank, by) : 0);
      [...places].forEach((place, index) => {
        context.fillStyle = paints[place];
        context.fillRect(x + inner * index / places.size, y, inner / places.size, inner);
      });
      if (plan.each === 1 && plan.size >= 22) {
        context.fillStyle = "#10131a";
        context.textAlign = "center";
        context.fillText(first, x + inner / 2, y + inner / 2 + 1);
        context.textAlign = "left";
      }
    }
    if (chosen >= 0) {
      const outline = (rank, paint, thick) => {
        const [x, y] = plan.place(Math.floor(rank / plan.each));
        context.strokeStyle = paint;
        context.lineWidth = thick;
        context.strokeRect(x, y, inner, inner);
      };
      for (const axis of axes) {
        const base = chosen - at(chosen, axis) * strides[axis];
        for (let place = 0; place < sizes[axis]; place++) outline(base + place * strides[axis], colour(axisColour(axis)), 2);
      }
      outline(chosen, colour("ink"), 3);
    }
    canvas.dataset.cells = plan.cells;
    canvas.dataset.each = plan.each;
    find("topology-hint").textContent = plan.each === 1 ? "A cell is a GPU, a box a node; point at one to see its groups"
      : `A cell is ${plan.each === perNode ? `a node of ${perNode} GPUs` : `${plan.each / perNode} nodes, ${plan.each} GPUs`}; `
        + "point at one to see the groups of its first GPU";
  });

  function choose(rank) {
    chosen = rank;
    const says = find("topology-says");
    says.replaceChildren();
    if (rank >= 0) {
      says.append(make("b", {}, `GPU ${rank}`), ` on node ${Math.floor(rank / perNode)}`);
      for (const axis of axes) {
        const base = rank - at(rank, axis) * strides[axis], end = base + (sizes[axis] - 1) * strides[axis];
        says.append(" · ", make("b", { style: `color: var(--${axisColour(axis)})` }, `${axis} ${at(rank, axis)}`),
          ` with ${sizes[axis]} ranks, ${base}…${end}${strides[axis] > 1 ? ` by ${strides[axis]}` : ""}`);
      }
    }
    redraw();
  }
  canvas.addEventListener("pointermove", (event) => {
    let best = -1;
    for (let cell = 0; cell < plan.cells && best < 0; cell++) {
      const [x, y] = plan.place(cell);
      if (event.offsetX >= x && event.offsetX < x + plan.size && event.offsetY >= y && event.offsetY < y + plan.size) best = cell;
    }
    if (best >= 0 && best * plan.each !== chosen) choose(best * plan.each);
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -plan.jump, ArrowDown: plan.jump }[event.key];
    if (!step) return;
    event.preventDefault();
    const cell = chosen < 0 ? 0 : Math.floor(chosen / plan.each) + step;
    if (cell >= 0 && cell < plan.cells) choose(cell * plan.each);
  });
  const ramp = () => {
    const size = sizes[by] ?? 1, segments = Math.min(size, 32);
    find("ramp").replaceChildren(`${named[by]} 0`, make("div", {}, ...Array.from({ length: segments }, (_, place) =>
      make("i", { style: `background: ${hue(place, segments)}` }))), size > 1 ? `${named[by]} ${size - 1}` : "");
  };
  find("topology-tools").append(...(axes.length > 1 ? ["colour by", ...axes.map((axis) => {
    const button = make("input", { type: "radio", name: "by", value: axis });
    button.checked = axis === by;
    button.addEventListener("change", () => { by = axis; ramp(); redraw(); });
    return make("label", {}, button, named[axis] ?? axis);
  })] : []));
  ramp();
}
