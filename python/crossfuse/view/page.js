"use strict";
// Marks the lines of CUDA that belong to a line of the schedule, and the other way round.
(() => {
  const made = [...document.querySelectorAll(".made li[data-line]")];
  const by = [...document.querySelectorAll(".by li[data-by]")];
  const makers = (line) => line.dataset.by.split(" ").filter(Boolean);
  const choose = (chosen, related) => {
    for (const line of [...made, ...by]) line.classList.remove("chosen", "of");
    chosen.classList.add("chosen");
    for (const line of related) line.classList.add("of");
    if (related.length) related[0].scrollIntoView({ block: "nearest" });
  };
  const of = (line) => by.filter((each) => makers(each).includes(line.dataset.line));
  for (const line of made) {
    line.addEventListener("click", () => choose(line, of(line)));
    line.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(line, of(line)); });
  }
  for (const line of by) {
    line.addEventListener("click", () => choose(line, makers(line).map((number) => made[number])));
  }
})();
