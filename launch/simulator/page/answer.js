// The answer at the top, and the sections that are plain elements.

function answer() {
  const fullest = memory.ranks.reduce((most, rank) => (rank.reserved_bytes > most.reserved_bytes ? rank : most));
  const verdict = find("verdict");
  const place = `${whole(topology.world_size)} × ${hardware.name}`;
  if (!proof.holds) {
    verdict.textContent = `Does not hold: ${counted(proof.faults.length, "fault")}`;
  } else if (!memory.fits) {
    verdict.textContent = `Does not fit: ${inBytes(memory.needed_bytes)} of ${inBytes(hardware.memory_bytes)}`;
  } else {
    verdict.textContent = `Fits and is proved: ${whole(Number(time.tokens_per_second.toPrecision(3)))} tokens/s`;
  }
  verdict.className = proof.holds && memory.fits ? "good" : "bad";
  find("what").append(make("b", {}, run.model), ` (${scaled(run.parameters, [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1, ""]])} `
    + `parameters) on ${place}, ${counted(topology.nodes, "node")}`);
  find("settings").textContent = [
    ...["dp", "tp", "pp", "cp", "ep"].filter((axis) => topology[axis] > 1).map((axis) => `${axis} ${topology[axis]}`),
    `ZeRO-${run.zero}`, run.schedule + (run.virtual_stages > 1 ? ` × ${run.virtual_stages} chunks` : ""),
    counted(run.microbatches, "microbatch").replace("batchs", "batches") + ` of ${run.microbatch_size}`,
    `global batch ${whole(run.global_batch)}`, `sequences of ${whole(run.sequence_length)}`, run.dtype,
    ...(run.sp ? ["sequence parallel"] : []), ...(run.recompute ? ["recompute"] : []), ...disturbances(),
  ].join(" · ");
  if (!memory.fits) find("settings").after(make("p", { class: "hint", id: "next" }, nextStep(fullest)));
  const tile = (title, figure, kind, ...lines) => make("div", { class: "card tile" }, make("span", {}, title),
    make("b", { class: kind }, figure), ...lines.map((line) => (line instanceof Node ? line : make("span", {}, line))));
  const tiles = find("tiles");
  if (time) tiles.append(
    tile("Speed", `${inSeconds(time.step_seconds)} a step`, "", `${whole(time.tokens_per_second_per_gpu)} tokens/s per GPU`,
      `a trillion tokens in ${digits(1e12 / time.tokens_per_second / 86400)} days`),
    tile("Efficiency", `${percent(time.mfu)} MFU`, "", `${percent(time.hfu)} HFU, recomputation counted`,
      `${scaled(time.model_flops_per_token, [[1e12, "TFLOPs"], [1e9, "GFLOPs"], [1e6, "MFLOPs"]])} a token`));
  tiles.append(
    tile("Memory", `${inBytes(memory.needed_bytes)} of ${inBytes(hardware.memory_bytes)}`, memory.fits ? "good" : "bad",
      bar([[memory.needed_bytes, memory.fits ? "good" : "bad", `needed\n${inBytes(memory.needed_bytes)}`]],
        Math.max(hardware.memory_bytes, memory.needed_bytes), hardware.memory_bytes),
      `peak ${inBytes(fullest.peak_bytes)} allocated, rank ${fullest.rank}, in ${inWords(fullest.at)}`,
      `${inBytes(fullest.reserved_bytes)} reserved, ${inBytes(memory.context_bytes)} context`),
    tile("Proof", proof.holds ? "✓ no deadlock" : `✗ ${counted(proof.faults.length, "fault")}`, proof.holds ? "good" : "bad",
      `${counted(proof.ranks, "rank")} in ${whole(proof.classes)} classes`, `${counted(proof.communications, "communication")}`));
}

/** What was slowed down for the sake of the question. */
function disturbances() {
  const { stragglers = {}, links = {} } = run.disturbed ?? {};
  return [...Object.entries(stragglers).map(([rank, factor]) => `rank ${rank} computes ${digits(factor)}× as long`),
    ...Object.entries(links).map(([rank, factor]) => `rank ${rank}'s messages take ${digits(factor)}× as long`)];
}
/** What to try where it does not fit: what most of the memory is held for decides. */
function nextStep(fullest) {
  const held = Object.entries(fullest.breakdown).sort((a, b) => b[1] - a[1]);
  const [kind, bytes] = held[0] ?? ["other", 0];
  const advice = kind === "activations" ? "keep less of the activations: --recompute, a smaller microbatch, --sp with more --tp"
    : run.zero < 3 ? `shard more of the states: --zero ${run.zero + 1}, or more ranks over --tp or --pp`
      : "spread the states over more ranks: --tp, --pp, or more GPUs";
  return `${kind} take ${inBytes(bytes)} of rank ${fullest.rank}'s peak; ${advice}. What fits: `
    + `triaxis plan --model ${run.model} --gpus ${topology.world_size} --hardware ${hardware.name}`;
}

// ---- where the step goes
function spending() {
  const section = find("time");
  const parts = new Map();
  for (const { what, seconds } of time.critical_path) parts.set(what, (parts.get(what) ?? 0) + seconds);
  const order = [...parts].sort((a, b) => b[1] - a[1]);
  const shown = order.slice(0, 8);
  const rest = sum(order.slice(8).map(([, seconds]) => seconds));
  if (rest) shown.push(["everything else", rest]);
  const total = sum(shown.map(([, seconds]) => seconds));
  const seen = {};
  const paints = shown.map(([what]) => { // an axis or computation has its colour, its further parts a weaker one
    const [first] = what.split(/[ ,]/);
    const name = first === "compute" ? "forward" : ORDER.includes(first) ? first : what === "update" ? "phase" : "world";
    seen[name] = (seen[name] ?? 1.3) - 0.3;
    return [name, Math.max(0.3, seen[name])];
  });
  section.append(
    make("p", { class: "hint" }, `The critical path: what makes up the ${inSeconds(time.step_seconds)}`),
    bar(shown.map(([what, seconds], at) => [seconds, paints[at][0], `${what}\n${inSeconds(seconds)}`, paints[at][1]]), total),
    make("div", { class: "legend" }, ...shown.map(([what, seconds], at) =>
      swatch(paints[at][0], `${what} ${inSeconds(seconds)} (${percent(seconds / total)})`, paints[at][1]))));
  const tallest = Math.max(...time.bubble, 1e-9);
  section.append(make("h3", {}, `Bubble: each stage's time with nothing to compute, at worst ${percent(tallest)} of the step`),
    make("div", { class: "columns" }, ...time.bubble.map((share, stage) => make("span",
      { "data-tip": `stage ${stage}: ${percent(share)}` }, time.bubble.length <= 8 ? percent(share) : "",
      make("i", { style: `height: ${50 * share / tallest}px` }), time.bubble.length <= 16 ? String(stage) : " "))));
}

// ---- peak memory by kind, communication by axis
function peaks() {
  const most = Math.max(hardware.memory_bytes, ...memory.ranks.map((rank) => rank.reserved_bytes));
  const groups = new Map(); // ranks whose figures read the same share a row
  for (const rank of memory.ranks) {
    const parts = KINDS.filter((kind) => rank.breakdown[kind]).map((kind) => [rank.breakdown[kind], kind, inBytes(rank.breakdown[kind])]);
    const key = JSON.stringify([inBytes(rank.peak_bytes), inBytes(rank.reserved_bytes), parts.map((part) => part[2])]);
    const alike = timeline.rows.find((row) => row.rank === rank.rank)?.ranks ?? 1;
    const found = groups.get(key);
    if (found) [found.alike, found.others] = [found.alike + alike, found.others + 1];
    else groups.set(key, { rank, parts, alike, others: 0 });
  }
  const half = Math.ceil(groups.size / 2);
  const columns = [make("div", { class: "rows" }), make("div", { class: "rows" })];
  [...groups.values()].forEach(({ rank, parts, alike, others }, index) => {
    const facts = [rank.place + (others ? `, and ${counted(others, "kind")} of rank with the same figures` : ""),
      counted(alike, "rank"), `at ${rank.at}, ${inWords(rank.at)}`, `${inBytes(rank.reserved_bytes)} reserved`];
    columns[index < half ? 0 : 1].append(make("span", {}, `rank ${rank.rank}`),
      bar(parts.map(([bytes, kind, text]) => [bytes, kindColour(kind), `${kind}\n${text}`]), most, hardware.memory_bytes),
      make("b", {}, inBytes(rank.peak_bytes)), make("small", {}, facts.join(" · ")));
  });
  find("peaks").append(
    make("p", { class: "hint" }, `A row for each kind of rank; the line is the GPU's ${inBytes(hardware.memory_bytes)}`),
    make("div", { class: "pair" }, ...columns),
    make("div", { class: "legend" }, ...KINDS.map((kind) => swatch(kindColour(kind), kind))));
}

function communication() {
  const figures = [traffic.sent_bytes_per_rank, traffic.messages_per_rank, time.busy_seconds, time.exposed_seconds];
  const axes = ordered(figures.flatMap(Object.keys)).filter((axis) => axis !== "compute"
    && figures.some((figure) => figure[axis]));
  const rows = make("div", { class: "rows" });
  for (const axis of axes) {
    const [sent, messages, busy, exposed] = figures.map((figure) => figure[axis] ?? 0);
    const hidden = Math.max(0, busy - exposed);
    const line = bar([[exposed, axisColour(axis), `waited for\n${inSeconds(exposed)}`],
      [hidden, axisColour(axis), `behind computation\n${inSeconds(hidden)}`, 0.4]], time.step_seconds);
    rows.append(make("b", {}, axis), line, make("span", {}, `${inSeconds(exposed)} of ${inSeconds(busy)} exposed`),
      make("small", {}, `${inBytes(sent)} sent a rank and step · ${counted(messages, "message")}`));
  }
  find("traffic").append(make("p", { class: "hint" }, axes.length
    ? `The busiest rank's step of ${inSeconds(time.step_seconds)}: strong what it waits for, pale what computation hides`
    : "Nothing is sent: there is one rank."), rows);
}

// ---- what was proved
const MEANING = {
  agreement: "the members of a group ask for the same operations in the same order",
  channels: "what is sent between two ranks is received, first in first out, and fits",
  progress: "nobody waits for ever, though a send ends only when its receive is posted",
  "one queue": "the same with all communication of a rank in one queue",
  handles: "every communication is waited for, once",
  gradients: "every gradient is reduced exactly as often as declared, over its group",
  memory: "at the end each rank holds what it held at the beginning",
};
function proved() {
  find("proof").append(
    make("p", { class: "hint" }, `${counted(proof.communications, "communication")} of ${counted(proof.ranks, "rank")}`
      + (proof.classes < proof.ranks ? `, which behave as ${whole(proof.classes)} classes` : "")),
    make("ul", {}, ...proof.obligations.map(({ name, holds, warned }) => {
      const [mark, kind, note] = !holds ? ["✗ ", "bad", " (broken)"] : warned ? ["! ", "warn", " (see the warning)"] : ["✓ ", "good", ""];
      return make("li", {}, make("b", { class: kind }, mark), make("b", {}, name),
        make("span", { class: "soft" }, `${MEANING[name] ? ": " : ""}${MEANING[name] ?? ""}${note}`));
    })));
  for (const [title, kind, texts] of [["Faults", "bad", proof.faults], ["Warnings", "warn", proof.warnings]]) {
    if (!texts.length) continue;
    find("proof").append(make("h3", { class: kind }, title), ...texts.map((text) => make("pre", { tabindex: "0" }, text)));
  }
}
