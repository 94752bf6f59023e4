"use strict";

// Theme: the system's until the reader chooses; the choice is remembered where the browser allows it.
(function () {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const remembered = function (value) {
    try {
      if (value) { window.localStorage.setItem("holdfast-theme", value); }
      return window.localStorage.getItem("holdfast-theme");
    } catch (error) {
      return value || null;
    }
  };
  const current = function () { return root.dataset.theme || (system.matches ? "dark" : "light"); };
  const show = function () { button.textContent = current() === "dark" ? "Light theme" : "Dark theme"; };
  const before = remembered();
  if (before === "dark" || before === "light") { root.dataset.theme = before; }
  button.addEventListener("click", function () {
    root.dataset.theme = current() === "dark" ? "light" : "dark";
    remembered(root.dataset.theme);
    show();
  });
  system.addEventListener("change", show);
  button.hidden = false;
  show();
})();

// Tables: a button in each heading sorts by it; again, the other way round. Empty cells stay at the end.
(function () {
  const key = function (row, column) {
    const cell = row.children[column];
    const text = cell.dataset.value === undefined ? cell.textContent.trim() : cell.dataset.value;
    const number = Number(text);
    return text === "" ? null : Number.isNaN(number) ? text : number;
  };
  const compare = function (a, b) {
    if (typeof a === "number" && typeof b === "number") { return a - b; }
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  };
  const sort = function (heading) {
    const table = heading.closest("table");
    const column = Array.prototype.indexOf.call(heading.parentNode.children, heading);
    const was = heading.getAttribute("aria-sort");
    const numeric = heading.dataset.kind === "number";
    const direction = was === "descending" ? "ascending" : was === "ascending" ? "descending" : numeric ? "descending" : "ascending";
    table.querySelectorAll("th[aria-sort]").forEach(function (other) { other.removeAttribute("aria-sort"); });
    heading.setAttribute("aria-sort", direction);
    const body = table.tBodies[0];
    const rows = Array.from(body.rows).map(function (row) { return [key(row, column), row]; });
    rows.sort(function (a, b) {
      if (a[0] === null || b[0] === null) { return (a[0] === null) - (b[0] === null); }
      return direction === "ascending" ? compare(a[0], b[0]) : compare(b[0], a[0]);
    });
    rows.forEach(function (pair) { body.appendChild(pair[1]); });
  };
  document.querySelectorAll("thead th button").forEach(function (button) {
    button.addEventListener("click", function () { sort(button.parentNode); });
  });
})();

// Paper cannot be unfolded: printing opens all blocks but the lists of runs, which would be a book.
(function () {
  let opened = [];
  window.addEventListener("beforeprint", function () {
    opened = Array.from(document.querySelectorAll("section:not(#runs) details:not([open])"));
    opened.forEach(function (block) { block.open = true; });
  });
  window.addEventListener("afterprint", function () {
    opened.forEach(function (block) { block.open = false; });
  });
})();

// A link into a closed block opens it.
(function () {
  const open = function () {
    let element = window.location.hash && document.getElementById(window.location.hash.slice(1));
    for (; element; element = element.parentElement) {
      if (element.tagName === "DETAILS") { element.open = true; }
    }
  };
  window.addEventListener("hashchange", open);
  open();
})();
