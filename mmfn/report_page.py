"""The frame of a report: its style sheet, its script, and the page around them."""

import base64
import hashlib
import html

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #f7f6f2; --card: #fffefb; --ink: #1d1f23; --soft: #5d6168; --rule: #dedbd2;
  --grid: #e9e6de; --c0: #0067a8; --c1: #c24a00; --c2: #00805c; --c3: #a3498a;
  --right: #00704f; --wrong: #b3261e; --accent: #0067a8;
  --serif: "Iowan Old Style", "Palatino Linotype", Palatino, "Book Antiqua", "URW Palladio L",
    "P052", Georgia, serif;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Helvetica Neue", sans-serif;

  --mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #15171a; --card: #1c1f23; --ink: #e8e6e1; --soft: #9ca1a9; --rule: #33373d;
    --grid: #2a2e33; --c0: #5cb4ec; --c1: #f0954a; --c2: #3cc79b; --c3: #dd97c8;
    --right: #3cc79b; --wrong: #ff8a7a; --accent: #5cb4ec;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 400 0.9375rem/1.5 var(--sans); font-variant-numeric: tabular-nums;
  -webkit-text-size-adjust: 100%;
}
main {
  max-width: 76rem; margin: 0 auto;
  padding: clamp(1.25rem, 4vw, 3.5rem) clamp(1rem, 4vw, 2.5rem);
}
h1, h2 {
  font-family: var(--serif); font-weight: 500; letter-spacing: -0.01em; text-wrap: balance;
}
h1 {
  font-size: clamp(1.9rem, 5vw, 2.9rem); line-height: 1.1; margin: 0; overflow-wrap: anywhere;
}
h2 { font-size: 1.45rem; line-height: 1.2; margin: 3.25rem 0 1.1rem; }
h3 { font-size: 0.875rem; font-weight: 600; margin: 0; }
h3 small { font-weight: 400; color: var(--soft); font-size: inherit; }
.kind { color: var(--soft); margin: 0 0 0.5rem; font-size: 0.8125rem; }
.kind::before {
  content: ""; display: inline-block; width: 1.6rem; height: 0.15rem; background: var(--accent);
  vertical-align: 0.26em; margin-right: 0.6rem;
}

.tiles {
  display: grid; grid-template-columns: repeat(var(--columns), 1fr);
  margin: 2rem 0 0; border-top: 1px solid var(--rule); border-bottom: 1px solid var(--rule);
}
.tiles div {
  padding: 0.95rem 0.75rem 0.9rem 0; display: flex; flex-direction: column-reverse;
  justify-content: flex-end;
}
.tiles dt { color: var(--soft); font-size: 0.8125rem; }
.tiles dd {
  margin: 0; font: 500 1.55rem/1.2 var(--serif); white-space: nowrap;
  font-variant-numeric: lining-nums tabular-nums;
}
.tiles div:first-child dd { color: var(--accent); }
.facts {
  display: flex; flex-wrap: wrap; gap: 0.3rem 1.75rem; margin: 0.95rem 0 0; font-size: 0.8125rem;
}
.facts div { display: flex; gap: 0.45rem; min-width: 0; }
.facts dt { color: var(--soft); white-space: nowrap; }
.facts dd { margin: 0; overflow-wrap: anywhere; }

.charts { display: grid; gap: 1rem; grid-template-columns: repeat(6, minmax(0, 1fr)); }
.chart {
  margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 6px;
  padding: 0.9rem 1rem 0.6rem; grid-column: span 2; min-width: 0;
  display: flex; flex-direction: column; justify-content: space-between;
}
.chart:nth-child(-n + 2) { grid-column: span 3; }
.chart:nth-child(-n + 2) .plot { height: 17rem; }
figcaption {
  display: flex; flex-wrap: wrap; justify-content: space-between; align-items: baseline;
  gap: 0 1rem;
}
.keys {
  flex-basis: 100%; display: flex; flex-wrap: wrap; gap: 0 1rem; margin: 0.2rem 0 0.8rem;
  font-size: 0.8125rem; color: var(--soft); min-height: 1.5em;
}
.keys output { color: var(--ink); font-weight: 600; }
.key i {
  display: inline-block; width: 0.9rem; border-top: 2.5px solid; margin-right: 0.4rem;
  vertical-align: 0.25em;
}
.key.c1 i { border-top-style: dashed; }
.key.c2 i { border-top-style: dotted; }
.at { margin-left: auto; font-size: 0.8125rem; color: var(--soft); }
.switch {
  display: inline-flex; border: 1px solid var(--rule); border-radius: 5px; overflow: hidden;
  font-size: 0.75rem;
}
.switch label { padding: 0.1rem 0.55rem; color: var(--soft); cursor: pointer; }
.switch label:has(:checked) { background: var(--ink); color: var(--card); }
.switch label:has(:focus-visible) { outline: 2px solid var(--accent); outline-offset: -2px; }
.switch input { position: absolute; opacity: 0; pointer-events: none; }
.chart:has(input.log:checked) .plot.linear, .chart:has(input.linear:checked) .plot.log {
  display: none;
}
.plot {
  position: relative; height: 10.5rem; margin: 0.45rem 0.5rem 1.7rem 3.1rem; touch-action: pan-y;
  cursor: crosshair;
}
.plot:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot path {
  fill: none; vector-effect: non-scaling-stroke; stroke: currentColor; stroke-linejoin: round;
}
.plot .grid { stroke: var(--grid); stroke-width: 1px; }
.plot .line { stroke-width: 1.75px; stroke-linecap: round; }
.plot .line.c1 { stroke-dasharray: 6 4; }
.plot .line.c2 { stroke-dasharray: 1 4; stroke-width: 2.25px; }
.plot .line.c3 { stroke-dasharray: 9 3 2 3; }
.plot .faint { stroke-width: 1px; opacity: 0.32; }
.plot .band { stroke: none; fill: currentColor; opacity: 0.2; }
.plot .mark { stroke-width: 6px; stroke-linecap: round; }
.c0 { color: var(--c0); }
.c1 { color: var(--c1); }
.c2 { color: var(--c2); }
.c3 { color: var(--c3); }
.key { color: var(--soft); }
.key.c0 i { color: var(--c0); }
.key.c1 i { color: var(--c1); }
.key.c2 i { color: var(--c2); }
.key.c3 i { color: var(--c3); }
.y, .x {
  position: absolute; font-size: 0.75rem; line-height: 1; color: var(--soft);
  white-space: nowrap; pointer-events: none;
}
.y { right: calc(100% + 0.55rem); transform: translateY(-50%); }
.x { top: calc(100% + 0.6rem); transform: translateX(-50%); }
.plot::after {
  content: "step"; position: absolute; top: calc(100% + 0.6rem); right: calc(100% + 0.55rem);
  font-size: 0.75rem; line-height: 1; color: var(--soft); opacity: 0.75;
}
.cursor {
  position: absolute; top: 0; bottom: 0; width: 1px; height: auto; margin: 0; border: 0;
  background: var(--soft); opacity: 0.6; pointer-events: none;
}
.dot {
  position: absolute; width: 9px; height: 9px; margin: -4.5px; border-radius: 50%;
  background: currentColor; box-shadow: 0 0 0 2px var(--card); pointer-events: none;
}
.lost {
  position: absolute; bottom: -3px; border: 4px solid transparent;
  border-bottom: 7px solid var(--wrong); transform: translateX(-50%);
}
[hidden] { display: none !important; }

.head {
  display: flex; flex-wrap: wrap; justify-content: space-between; align-items: baseline;
  gap: 0 1.5rem;
}
.head h2 { margin-bottom: 1.1rem; }
.head .switch { font-size: 0.8125rem; }
.samples {
  display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 16rem), 1fr));
}
.shown:has(input.wrong:checked) .sample.is-right,
.shown:has(input.right:checked) .sample.is-wrong {
  display: none;
}
.sample {
  background: var(--card); border: 1px solid var(--rule); border-radius: 6px; overflow: hidden;
}
.sample.is-wrong { border-color: var(--wrong); box-shadow: inset 0 3px 0 var(--wrong); }
.pictures {
  display: flex; flex-wrap: wrap; gap: 2px; padding: 0.9rem 0.9rem 0; align-items: center;
}
.pictures img {
  display: block; max-width: 100%; width: auto; height: auto; max-height: 16rem; border-radius: 3px;
}
.pictures:has(img:nth-of-type(2)) img { max-width: calc(50% - 1px); max-height: 8rem; }
.pictures:has(img:nth-of-type(5)) img { max-width: calc(33.3% - 2px); }
.pictures img.small { image-rendering: pixelated; width: auto; height: 5.5rem; }
.pictures span { color: var(--soft); font-size: 0.8125rem; padding: 0 0.4rem; }
.sample { display: flex; flex-direction: column; }
.sample .text {
  padding: 0.8rem 0.95rem 0.75rem; flex: 1; display: flex; flex-direction: column;
}
.sample p {
  margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 11rem; overflow-y: auto;
}
.sample .question { margin-bottom: 0.6rem; }
.sample dl {
  margin: 0; display: grid; grid-template-columns: auto 1fr; gap: 0.15rem 0.75rem;
  font-size: 0.875rem; border-top: 1px solid var(--grid); padding-top: 0.55rem;
}
.sample dt { color: var(--soft); }
.sample dd {
  margin: 0; min-width: 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 9rem;
  overflow-y: auto;
}
.sample .verdict { font-weight: 600; font-size: 0.875rem; margin-top: auto; padding-top: 0.5rem; }
.is-right .verdict { color: var(--right); }
.is-wrong .verdict { color: var(--wrong); }

.config { columns: 3 19rem; column-gap: 2.25rem; }
.config section { break-inside: avoid; margin: 0 0 1.5rem; }
.config h3 { padding-bottom: 0.35rem; border-bottom: 1px solid var(--rule); }
.config dl { margin: 0; font-size: 0.8125rem; }
.config dl div {
  display: flex; justify-content: space-between; gap: 1rem; padding: 0.22rem 0;
  border-bottom: 1px solid var(--grid);
}
.config dt { color: var(--soft); flex: none; max-width: 55%; overflow-wrap: anywhere; }
.config dd {
  margin: 0; font-family: var(--mono); font-size: 0.78rem; text-align: right; min-width: 0;
  overflow-wrap: anywhere; white-space: pre-wrap;
}
.none { color: var(--soft); grid-column: 1 / -1; margin: 0; }
dl:empty { display: none; }
@media (max-width: 62rem) {
  .chart { grid-column: span 3; }
  .tiles { grid-template-columns: repeat(auto-fill, minmax(min(9.5rem, 44%), 1fr)); }
}
@media (max-width: 44rem) {
  .chart, .chart:nth-child(-n + 2) { grid-column: 1 / -1; padding: 0.8rem 0.75rem 0.4rem; }
  .chart:nth-child(-n + 2) .plot { height: 13rem; }
  h2 { margin-top: 2.5rem; }
}
@media print { .switch { display: none; } .chart, .sample { break-inside: avoid; } }
"""

SCRIPT = """
for (const chart of document.querySelectorAll("figure.chart")) {
  const lines = JSON.parse(chart.querySelector("script").textContent);
  const outputs = [...chart.querySelectorAll("output")];
  const rest = outputs.map((output) => output.textContent);
  const at = chart.querySelector(".at");
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const nearest = (list, step) => {
    let low = 0, high = list.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (list[middle] <= step) low = middle; else high = middle;
    }
    return step - list[low] <= list[high] - step ? low : high;
  };
  for (const plot of chart.querySelectorAll(".plot")) {
    const [left, right] = plot.dataset.x.split(" ").map(Number);
    const [bottom, top] = plot.dataset.y.split(" ").map(Number);
    const scale = plot.dataset.log === "1" ? Math.log : (value) => value;
    const cursor = plot.querySelector(".cursor");
    const dots = [...plot.querySelectorAll(".dot")];
    const place = (step) => (100 * (step - left)) / (right - left) + "%";
    let shown = steps.length - 1;
    const show = (index) => {
      shown = Math.max(0, Math.min(steps.length - 1, index));
      const step = steps[shown];
      cursor.hidden = false;
      cursor.style.left = place(step);
      at.textContent = "step " + step.toLocaleString("en");
      lines.forEach((line, i) => {
        const k = nearest(line.steps, step);
        const value = line.values[k];
        outputs[i].textContent = line.texts[k];
        dots[i].hidden = value === null;
        if (value === null) return;
        dots[i].style.left = place(line.steps[k]);
        dots[i].style.top =
          (100 * (scale(top) - scale(value))) / (scale(top) - scale(bottom)) + "%";
      });
    };
    const hide = () => {
      cursor.hidden = true;
      at.textContent = "";
      dots.forEach((dot) => (dot.hidden = true));
      outputs.forEach((output, i) => (output.textContent = rest[i]));
    };
    const point = (event) => {
      const box = plot.getBoundingClientRect();
      show(nearest(steps, left + ((event.clientX - box.left) / box.width) * (right - left)));
    };
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      show(shown + move);
    });
  }
}
"""


def page(title: str, body: str) -> str:
    """Put a body in a page that may load nothing, and run this module's script only."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
