"use strict";
// Draws the charts; and on a live page, asks for new content every two seconds.
(() => {
  const SECONDS = 2, HEIGHTS = { large: 300, small: 110 }, HEIGHT = 170;
  const body = document.body, main = document.querySelector("main"), state = document.getElementById("state");
  let drawn = [];

  const colour = name => () => getComputedStyle(body).getPropertyValue(name).trim();
  const short = value => value === null || value === undefined ? "" :
    value && !(Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6) ? Number(value.toPrecision(5)).toExponential() :
    value.toLocaleString("en", { maximumSignificantDigits: 6 });

  // ---------------------------------------------------------------- charts

  // Of each line the step that is nearest to the pointer and has a value: lines have steps of their own.
  function nearest(plot, line, index) {
    const values = plot.data[line];
    for (let away = 0; line && away < values.length; away++) {
      for (const each of [index - away, index + away]) if (Number.isFinite(values[each])) return each;
    }
    return index;
  }

  // Draws a chart; `before` is what its reader has chosen.
  function draw(place, before = {}) {
    const { lines, level, logarithmic } = JSON.parse(place.dataset.chart), log = before.log ?? logarithmic ?? false;
    const series = [{ label: "step", value: (_, step) => short(step) }], bands = [];
    const unlabelled = { class: "unlabelled", spanGaps: true, points: { show: false } };
    lines.forEach(([label, , ...columns], i) => {
      series.push({ label, stroke: colour(`--c${i}`), width: 1.6, spanGaps: true, value: (_, value) => short(value) });
      if (columns.length === 1) return;
      bands.push({ series: [series.length + 1, series.length], fill: () => `${colour(`--c${i}`)()}38` });
      series.push(unlabelled, { ...unlabelled });
    });
    const tables = lines.map(([, ...columns]) => columns);
    if (level) {
      const steps = lines.flatMap(([, own]) => [own[0], own[own.length - 1]]);
      const ends = [...new Set([Math.min(...steps), Math.max(...steps)])];
      tables.push([ends, ends.map(() => level[1])]);
      series.push({ label: level[0], stroke: colour("--soft"), dash: [5, 4], points: { show: false }, spanGaps: true,
        value: () => short(level[1]) });
    }
    const edge = { stroke: colour("--edge"), width: 1 };
    const axis = { stroke: colour("--soft"), grid: edge, ticks: { ...edge, size: 4 }, font: "11px system-ui, sans-serif",
      values: (_, values) => values.map(short) };
    const [, height] = Object.entries(HEIGHTS).find(([name]) => place.closest(`.${name}`)) || [, HEIGHT];
    const plot = new uPlot({
      width: place.clientWidth, height, series, bands, padding: [8, null, null, null],
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: [
        { ...axis, size: 26, space: 60, incrs: [...Array(16).keys()].flatMap(i => [1, 2, 5].map(n => n * 10 ** i)) },
        { ...axis, space: 22, size: (_, values) => 14 + 7 * Math.max(3, ...(values || []).map(each => each.length)) },
      ],
      cursor: { y: false, dataIdx: nearest, sync: { key: "steps", scales: ["x", null] } },
      legend: { markers: { fill: (_, i) => series[i].stroke(), width: 0 } },
    }, uPlot.join(tables), place);
    drawn.push({ place, plot, log });
    if (before.range) plot.setScale("x", before.range);
    if (before.left >= 0) plot.setCursor(before);
    if (logarithmic === null) return;
    const button = document.createElement("button");
    button.textContent = "log";
    button.ariaPressed = log;
    button.addEventListener("click", () => { draw(place, { ...remove(place), log: !log }); });
    place.previousElementSibling.append(button);
  }

  // Takes a chart away; returns what its reader has chosen: the scale, the steps that are shown, the place pointed at.
  function remove(place) {
    const { plot, log } = drawn.find(each => each.place === place), { min, max } = plot.scales.x, steps = plot.data[0];
    const { left, top } = plot.cursor;
    drawn = drawn.filter(each => each.place !== place);
    plot.destroy();
    place.previousElementSibling.querySelector("button")?.remove();
    return { log, left, top, range: min > steps[0] || max < steps[steps.length - 1] ? { min, max } : null };
  }

  const resized = new ResizeObserver(entries => {
    for (const { target } of entries) {
      const plot = drawn.find(each => each.place === target)?.plot;
      if (plot && plot.width !== target.clientWidth) plot.setSize({ width: target.clientWidth, height: plot.height });
    }
  });

  // ---------------------------------------------------------------- the page

  const all = selector => [...main.querySelectorAll(selector)];
  const name = place => place.closest("figure").querySelector("b").textContent;
  const summary = details => details.firstElementChild.textContent;

  function show(chosen = new Map()) {
    for (const place of all(".plot")) {
      draw(place, chosen.get(name(place)));
      resized.observe(place);
    }
    for (const each of all("details")) each.given = each.open;
    for (const time of all("time")) {
      const when = new Date(time.dateTime), today = when.toDateString() === new Date().toDateString();
      time.textContent = when.toLocaleString([], { ...(today ? {} : { dateStyle: "medium" }), timeStyle: "short" });
    }
  }

  function replace(content) {
    const chosen = new Map(drawn.map(({ place }) => [name(place), remove(place)]));
    const opened = new Map(all("details").filter(each => each.open !== each.given).map(each => [summary(each), each.open]));
    const scrolled = all(".scroll").map(each => [each.scrollLeft, each.scrollTop]);
    resized.disconnect();
    main.innerHTML = content;  // our own markup, in which all text is escaped
    show(chosen);
    for (const each of all("details")) each.open = opened.get(summary(each)) ?? each.open;
    all(".scroll").forEach((each, i) => each.scrollTo(...(scrolled[i] || [0, 0])));
  }

  show();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const { place } of drawn) draw(place, remove(place));
  });

  if (body.dataset.live === undefined) return;
  const token = new URLSearchParams(location.search).get("token");

  async function look() {
    try {
      const answer = await fetch(`content?token=${encodeURIComponent(token)}&version=${body.dataset.live}`);
      if (answer.status === 200) {
        replace(await answer.text());
        body.dataset.live = answer.headers.get("X-Version");
      }
      state.textContent = answer.ok ? "live" : `not live: the server answers ${answer.status}`;
    } catch {
      state.textContent = "not live: the server has ended";
    }
    setTimeout(look, 1000 * SECONDS);
  }

  look();
})();
