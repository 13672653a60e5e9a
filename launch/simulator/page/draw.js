// Draws what there is: a simulation whose proof fails has no times.

const SECTIONS = [
  ["topology", true, drawTopology], ["time", time, spending], ["traffic", time, communication],
  ["memory", memory.curves.length, drawMemory], ["timeline", timeline.rows.length, drawTimeline],
  ["peaks", true, peaks], ["proof", true, proved],
];
answer();
for (const [id, there, draw] of SECTIONS) {
  if (there) draw();
  else find(id).closest("section").remove();
}
document.documentElement.dataset.ready = "true";
