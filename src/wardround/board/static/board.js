// The board's only script: filter and sort the list, and ask the board itself how things stand.
// It puts no text of a run into the page as markup: the one fragment it takes was escaped by the board.
"use strict";

const EVERY = 2000; // milliseconds between two questions, while the page is looked at

function repeat(ask) {
  let timer = 0;
  async function turn() {
    clearTimeout(timer);
    let goes_on = true;
    if (!document.hidden) {
      try { goes_on = await ask(); } catch { goes_on = true; } // the board may be away for a moment
    }
    if (goes_on) timer = setTimeout(turn, EVERY);
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden) turn(); });
  timer = setTimeout(turn, EVERY);
}

async function answer(address) {
  const response = await fetch(address, { cache: "no-store" });
  if (!response.ok) throw new Error(String(response.status));
  return response.json();
}

function list(form) {
  const body = form.querySelector("tbody");
  const rows = [...body.rows].map(row => ({ row, text: row.textContent.toLowerCase() }));
  const count = document.getElementById("count");
  const whole = count.textContent;
  const filter = document.getElementById("filter");

  function apply() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const { row, text } of rows) {
      row.hidden = !words.every(word => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    count.textContent = words.length ? `${shown} of ${rows.length} runs` : whole;
  }
  filter.addEventListener("input", apply);
  filter.addEventListener("keydown", event => { if (event.key === "Enter") event.preventDefault(); });
  apply(); // a browser may have kept what was typed before

  const heads = [...form.querySelectorAll("thead th")];
  heads.forEach((head, column) => {
    const button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", () => {
      const numeric = head.classList.contains("number");
      const up = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "descending" : !numeric;
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const order = row => row.cells[column].dataset.order ?? row.cells[column].textContent.trim();
      const compare = numeric
        ? (a, b) => Number(order(a)) - Number(order(b))
        : (a, b) => order(a).localeCompare(order(b), "en", { numeric: true });
      const sorted = [...body.rows].sort((a, b) => (up ? 1 : -1) * compare(a, b));
      body.append(...sorted);
    });
  });

  repeat(async () => {
    const found = await answer("/api/runs");
    if (found.version === form.dataset.version) return true;
    const link = document.createElement("a");
    link.href = "/";
    link.textContent = "The list has changed. Show it as it is now.";
    document.getElementById("stale").replaceChildren(link);
    return false;
  });
}

function live(box) {
  let before = "";
  repeat(async () => {
    const found = await answer(box.dataset.address);
    if (found.html !== before) box.innerHTML = before = found.html;
    if (found.state === "finished" && !document.querySelector(".links")) location.reload();
    return found.state !== "finished";
  });
}

const form = document.getElementById("runs");
if (form) list(form);
const box = document.getElementById("progress");
if (box) live(box);
