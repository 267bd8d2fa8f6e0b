"use strict";
const specifications = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
let views = [];

function theme() {
  const style = getComputedStyle(document.documentElement);
  const [ink, soft, line] = ["--ink", "--soft", "--line"].map((name) => style.getPropertyValue(name).trim());
  const text = { labelColor: soft, titleColor: ink };
  const category = dark.matches ? ["#6cb0ff", "#ffa85c", "#5fd08c", "#ff8c8c", "#c8a4ff", "#d3b36e"]
                                : ["#1667c0", "#d2620b", "#1b8a4c", "#c7343b", "#7b4bc0", "#8a6a14"];
  const heatmap = dark.matches ? ["#202a36", "#6cb0ff"] : ["#eaf1fa", "#0b4a9e"];
  return {
    background: "transparent",
    font: "system-ui, sans-serif",
    view: { stroke: null },
    axis: { ...text, gridColor: line, domainColor: line, tickColor: line, labelFontSize: 11, titleFontWeight: "normal" },
    legend: { ...text, labelFontSize: 12, layout: { bottom: { direction: "vertical", anchor: "start" } } },
    range: { category, heatmap },
    mark: { color: category[0] },
    rule: { color: ink },
  };
}

async function draw() {
  views.forEach((view) => view.finalize());
  views = [];
  for (const [name, specification] of Object.entries(specifications)) {
    const values = document.getElementById(`data-${specification.data.name}`).textContent;
    const filled = { ...specification, data: { ...specification.data, values } };
    const options = { actions: false, renderer: "svg", config: theme() };
    views.push((await vegaEmbed(`#chart-${name}`, filled, options)).view);
  }
  across();
}

function across() {
  const chosen = document.querySelector("input[name=across]:checked");
  for (const view of chosen ? views : []) {
    if ("across" in view.getState().signals) view.signal("across", chosen.value).runAsync();
  }
}

for (const link of document.querySelectorAll("a[data-of]")) {
  const text = document.getElementById(`data-${link.dataset.of}`).textContent;
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
}
document.querySelectorAll("input[name=across]").forEach((input) => input.addEventListener("change", across));
dark.addEventListener("change", draw);
draw();
