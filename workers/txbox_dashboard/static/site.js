// Keeps pages live and draws their charts. No text of the database is ever made into HTML here.
"use strict";

const PACE_MS = 2000;
const COLOURS = { light: ["#3450a3", "#7a7f8c", "#9a6400", "#b3261e", "#6b2fa0", "#00695c", "#455a64"],
                  dark: ["#8fa8ff", "#a6acbb", "#e0ac4f", "#ff8a80", "#c79bf2", "#63cbbd", "#a7bcc7"] };
const dark = matchMedia("(prefers-color-scheme: dark)");
let paused = false;

// --- the pace: every region that asks for it is loaded again while it is looked at ---------------------------------

function mayRefresh(live) {
  // What a person has begun in there stays as it is.
  return live && !paused && !document.hidden && !live.querySelector("input:checked, details[data-keep][open], dialog[open]")
    && !live.contains(document.activeElement?.closest("input, select, textarea"));
}

setInterval(() => {
  const live = document.getElementById("live");
  if (live?.hasAttribute("hx-get") && mayRefresh(live)) htmx.trigger(live, "refresh");
}, PACE_MS);

document.addEventListener("DOMContentLoaded", () => {
  const pace = document.getElementById("pace");
  if (!pace) return;
  pace.hidden = false;
  pace.addEventListener("click", () => {
    paused = !paused;
    pace.setAttribute("aria-pressed", String(paused));
    pace.textContent = paused ? "Update again" : "Stop updates";
  });
});

// --- a database or a dashboard that is away: what is shown stays, and says since when it is old ----------------------

let shownAt = new Date(), isLost = false;

function lost(why) {
  const note = document.getElementById("lost");
  isLost = true;
  note.textContent = `${why} What is shown is from ${shownAt.toISOString().slice(11, 19)} UTC.`;
  note.hidden = false;
  document.getElementById("live")?.classList.add("stale");
}

document.addEventListener("htmx:after:request", (event) => {
  const status = event.detail.ctx?.response?.raw?.status;
  if (status === undefined) return;
  if (status >= 400) {
    lost(status === 503 ? "The database cannot be used." : `The dashboard answered ${status}.`);
    return;
  }
  shownAt = new Date();
  if (isLost) {
    isLost = false;
    document.getElementById("lost").hidden = true;
    document.getElementById("live")?.classList.remove("stale");
  }
});
document.addEventListener("htmx:error", () => lost("The dashboard cannot be reached."));

// --- forms -----------------------------------------------------------------------------------------------------------

document.addEventListener("change", (event) => {
  const every = event.target.closest("input[data-every]");
  if (!every) return;
  for (const one of document.querySelectorAll(`input[name="${CSS.escape(every.dataset.every)}"]`)) one.checked = every.checked;
});

// A phone shows letters first: their filter is folded there until it is asked for.
const narrow = matchMedia("(max-width: 40rem)");
function foldFilter() {
  for (const one of document.querySelectorAll("details.filter")) one.open = !narrow.matches;
}
narrow.addEventListener("change", foldFilter);
document.addEventListener("DOMContentLoaded", foldFilter);

document.addEventListener("submit", (event) => {
  const question = event.submitter?.dataset.confirm;
  if (question && !confirm(question)) event.preventDefault();
});

// --- charts: <txbox-chart data-times="[…]" data-series="[[name, [counts]], …]" data-so-far="yes"> ----------------------------------------

function clock(seconds, times) {
  // In UTC, as everywhere: the time of day; the date, too, over more than a day; seconds within some minutes.
  const text = new Date(seconds * 1000).toISOString(), range = times[times.length - 1] - times[0];
  return range > 86400 ? `${text.slice(5, 10)} ${text.slice(11, 16)}` : text.slice(11, range < 900 ? 19 : 16);
}

class Chart extends HTMLElement {
  static observedAttributes = ["data-times", "data-series", "data-so-far"];

  connectedCallback() {
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this);
    this.redraw = () => this.draw();
    dark.addEventListener("change", this.redraw);
    this.draw();
  }

  disconnectedCallback() {
    this.resized.disconnect();
    dark.removeEventListener("change", this.redraw);
  }

  attributeChangedCallback() {
    if (this.isConnected && !this.waiting) {
      this.waiting = true;  // the attributes change one after the other
      queueMicrotask(() => { this.waiting = false; this.draw(); });
    }
  }

  draw() {
    const times = JSON.parse(this.dataset.times), series = JSON.parse(this.dataset.series);
    const shape = JSON.stringify([series.map(([name]) => name), this.clientWidth, dark.matches, this.dataset.soFar]);
    // The stretch that is not over is a line of its own: dashed.
    const soFar = this.dataset.soFar === "yes", linear = uPlot.paths.linear();
    const before = (plot, place, from, to) => linear(plot, place, from, Math.max(to - soFar, from));
    const last = (plot, place, from, to) => linear(plot, place, Math.max(to - 1, from), to);
    const data = [times, ...series.map(([, counts]) => counts), ...(soFar ? series.map(([, counts]) => counts) : [])];
    if (this.plot && this.shape === shape) {
      this.plot.setData(data);
      return;
    }
    this.plot?.destroy();
    this.shape = shape;
    const colours = dark.matches ? COLOURS.dark : COLOURS.light;
    const line = ([label], place) => ({ label, stroke: colours[place % colours.length], width: 2, points: { show: false } });
    const axis = { stroke: dark.matches ? "#c5cad6" : "#4a4f5c", grid: { stroke: dark.matches ? "#333945" : "#e3e6ec" } };
    this.plot = new uPlot({
      width: Math.max(this.clientWidth, 200), height: 220,
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      scales: { y: { range: (_plot, _least, most) => [0, Math.max(most, 1) * 1.05] } },
      axes: [{ ...axis, values: (_plot, splits) => splits.map((at) => clock(at, times)) }, { ...axis, size: 60 }],
      series: [{ value: (plot, at) => at === null ? "" : clock(at, times) + (soFar && at === plot.data[0].at(-1) ? ", so far" : "") },
        ...series.map((one, place) => ({ ...line(one, place), dash: place ? [6, 2 + 2 * place] : undefined, paths: before })),
        ...(soFar ? series.map((one, place) => ({ ...line(one, place), dash: [2, 4], paths: last, class: "so-far" })) : [])],
    }, data, this);
  }
}
customElements.define("txbox-chart", Chart);
