"use strict";
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
for (const strip of document.querySelectorAll(".strip")) {
  const regions = [...strip.querySelectorAll("a.region")];
  regions.forEach((region, index) => { region.tabIndex = index ? -1 : 0; });
  strip.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const at = regions.indexOf(document.activeElement);
    const to = event.key === "Home" ? 0 : event.key === "End" ? regions.length - 1 : step && at >= 0 ? at + step : -1;
    if (to < 0 || to >= regions.length) return;
    event.preventDefault();
    regions[Math.max(at, 0)].tabIndex = -1;
    regions[to].tabIndex = 0;
    regions[to].focus();
  });
}
