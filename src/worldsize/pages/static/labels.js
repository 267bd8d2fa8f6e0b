"use strict";
const { columns, classes, rows } = JSON.parse(document.getElementById("data").textContent);

function show() {
  const changed = rows.map((row) => row.label !== row.given);
  document.querySelectorAll("figure").forEach((figure) => {
    figure.classList.toggle("changed", changed[figure.dataset.row]);
  });
  document.getElementById("changed").textContent = changed.filter(Boolean).length.toLocaleString("en");
}

document.querySelectorAll("figure").forEach((figure) => {
  const row = rows[figure.dataset.row];
  const select = figure.querySelector("select");
  const first = [...new Set([row.given, row.label, row.proposed].filter(Boolean))];
  for (const name of [...first, ...classes.filter((name) => !first.includes(name))]) {
    select.add(new Option(name, name, false, name === row.label));
  }
  select.addEventListener("change", () => {
    row.label = select.value;
    show();
  });
});

const quoted = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);

document.getElementById("download").addEventListener("click", () => {
  const lines = [columns, ...rows.map((row) => columns.map((name) => row[name]))];
  const text = lines.map((line) => line.map(quoted).join(",") + "\n").join("");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = "labels.csv";
  link.click();
});

show();
