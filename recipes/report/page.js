"use strict";
// The page works without this script; with it, marks answer to pointer and keyboard, and the table sorts.
const jobs = JSON.parse(document.getElementById("jobs").textContent);
const tip = document.getElementById("tip");
const dialog = document.querySelector("dialog");

function show(index) {
  const job = jobs[index];
  dialog.querySelector("h2").textContent = job.name;
  const list = dialog.querySelector("dl");
  list.replaceChildren(...job.rows.flatMap(([name, value]) => {
    const [term, text] = [document.createElement("dt"), document.createElement("dd")];
    term.textContent = name;
    text.textContent = value;
    return [term, text];
  }));
  dialog.querySelector("pre.command").textContent = job.command;
  dialog.querySelector("pre.config").textContent = job.config;
  dialog.showModal();
  dialog.scrollTop = 0;
}

function place(event) {
  const box = tip.getBoundingClientRect();
  const x = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const y = event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${Math.max(8, y)}px`;
}

// Marks are named CHART--INDEX in the drawings.
for (const mark of document.querySelectorAll("svg g[id*='--']")) {
  const [, index] = mark.id.split("--");
  if (index === "line") {
    mark.dataset.series = mark.id.split("--")[2];
    continue;
  }
  const job = jobs[index];
  mark.dataset.point = index;
  mark.dataset.series = job.series;
  mark.setAttribute("role", "button");
  mark.setAttribute("tabindex", "0");
  mark.setAttribute("aria-label", `${job.tip.replaceAll("\n", ", ")}: show its config`);
  mark.addEventListener("click", () => show(index));
  mark.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); show(index); }
  });
  mark.addEventListener("pointerenter", (event) => { tip.textContent = job.tip; tip.style.visibility = "visible"; place(event); });
  mark.addEventListener("pointermove", place);
  mark.addEventListener("pointerleave", () => { tip.style.visibility = "hidden"; });
}

for (const row of document.querySelectorAll("tbody tr")) row.addEventListener("click", () => show(row.dataset.point));
dialog.querySelector("button").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

let chosen = null;
for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    chosen = chosen === button.dataset.series ? null : button.dataset.series;
    for (const other of document.querySelectorAll(".legend button")) other.setAttribute("aria-pressed", other.dataset.series === chosen);
    for (const mark of document.querySelectorAll("svg [data-series]")) mark.classList.toggle("dimmed", chosen !== null && mark.dataset.series !== chosen);
    for (const row of document.querySelectorAll("tbody tr")) row.hidden = chosen !== null && row.dataset.series !== chosen;
  });
}

for (const head of document.querySelectorAll("th")) {
  head.querySelector("button").addEventListener("click", () => {
    const falling = head.getAttribute("aria-sort") === "ascending";
    for (const other of document.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const body = document.querySelector("tbody");
    const value = (row) => row.cells[head.cellIndex].dataset.value ?? row.cells[head.cellIndex].textContent;
    const order = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "") || 0;  // what has no number stands last, both ways
      const numbers = !Number.isNaN(Number(x)) && !Number.isNaN(Number(y));
      return (falling ? -1 : 1) * (numbers ? x - y : x.localeCompare(y));
    };
    body.append(...[...body.rows].sort(order));
  });
}

// Light and dark follow the system until the reader chooses.
const modes = document.getElementById("mode");
modes.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.mode ? root.dataset.mode === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.mode = dark ? "light" : "dark";
});
