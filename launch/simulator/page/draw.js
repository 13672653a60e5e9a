// Draws what there is: a simulation whose proof fails may have no times.

const SECTIONS = [
  ["topology", topology, drawTopology], ["time", time, spending], ["traffic", time && traffic, communication],
  ["memory", memory?.curves.length, drawMemory], ["timeline", timeline?.rows.length, drawTimeline],
  ["peaks", memory, peaks], ["proof", proof, proved],
];
answer();
for (const [id, needed, draw] of SECTIONS) {
  if (needed) draw();
  else find(id).closest("section").remove();
}
document.documentElement.dataset.ready = "true";
