"use strict";
// What the page is drawn from, figures for people, elements and colours. report.py joins the scripts, this one first.

const { run, topology, hardware, proof, time, memory, traffic, timeline } =
  JSON.parse(document.getElementById("simulation").textContent);
const find = (id) => document.getElementById(id);

// ---- figures for people
const digits = (value, most = 3) => value.toLocaleString("en-US", { maximumSignificantDigits: most });
const whole = (value) => Math.round(value).toLocaleString("en-US");
const percent = (share) => (share > 0 && share < 0.001 ? "<0.1%" : `${digits(100 * share, share < 0.1 ? 2 : 3)}%`);
const scaled = (value, units) => {
  const [size, unit] = units.find(([size]) => Math.abs(value) >= size * 0.9995) ?? units.at(-1);
  return `${digits(value / size)} ${unit}`;
};
const inBytes = (value) => scaled(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
const inSeconds = (value) => (value ? scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) : "0 s");
const counted = (value, noun) => `${whole(value)} ${noun}${value === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((total, value) => total + value, 0);

// ---- elements and colours
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
const style = getComputedStyle(document.documentElement);
const colour = (name) => style.getPropertyValue(`--${name}`).trim();
const axisColour = (axis) => (colour(axis) ? axis : "world");
const KINDS = [...new Set(memory.ranks.flatMap((rank) => Object.keys(rank.breakdown)))];
const kindColour = (kind) => { // memory_name in palette.py says the same
  const [first] = kind.split(" ");
  const name = `memory-${{ unreduced: "buckets", pipeline: "messages" }[first] ?? first}`;
  return colour(name) ? name : "memory-other";
};
const ORDER = ["tp", "cp", "ep", "pp", "dp", "world"];
const ordered = (axes) => [...new Set(axes)].sort((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b));
const AXES = ordered(timeline.rows.flatMap((row) => Object.keys(row.lanes)));
const swatch = (name, text, strength = 1) =>
  make("span", { style: `--colour: var(--${name}); --strength: ${strength}` }, text);

function parse(action) {
  const [, chunk, letter, microbatch] = /^(\d+)([A-Z])(\d+)$/.exec(action) ?? [];
  if (!letter) return { paint: "phase", short: "", chunk: 0, text: action };
  const kind = { F: "forward", B: "backward", W: "backward of weights", I: "backward of inputs" }[letter] ?? letter;
  const part = run.virtual_stages > 1 ? `, chunk ${chunk}` : "";
  return { paint: { F: "forward", W: "weights", I: "inputs" }[letter] ?? "backward", short: microbatch, chunk: Number(chunk),
    text: `${action}: ${kind} of microbatch ${microbatch}${part}` };
}

/** `0B6` in words: the backward of microbatch 6. */
const inWords = (action) => parse(action).text.replace(/^\S+: /, "the ");

/** parts: [amount, colour name, label, strength]; a line at `limit`. */
function bar(parts, most, limit) {
  const told = parts.map(([, , label]) => label.replace("\n", " ")).join(", ");
  const element = make("div", { class: "bar", role: "img", "aria-label": told }, ...parts.map(([amount, paint, label, strength = 1]) =>
    make("i", { style: `width: ${100 * amount / most}%; background: var(--${paint}); opacity: ${strength}`,
      "data-tip": label })));
  if (limit) element.append(make("u", { style: `left: calc(${Math.min(100, 100 * limit / most)}% - 2px)` }));
  return element;
}
