"use strict";
// Values under the pointer; and on a live page, new content every two seconds.
(() => {
  const SECONDS = 2;

  function nearest(points, x) {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
  }

  function point(event) {
    const plot = event.target.closest && event.target.closest(".plot");
    for (const other of document.querySelectorAll(".plot.pointed")) {
      if (other !== plot) hide(other);
    }
    if (!plot) return;
    const box = plot.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width;
    const lines = JSON.parse(plot.dataset.lines);
    const found = lines.map(line => [line.label, nearest(line.points, x)]);
    const [, [at, step]] = found.reduce((a, b) => Math.abs(b[1][0] - x) < Math.abs(a[1][0] - x) ? b : a);
    const values = found.map(([label, each]) => lines.length > 1 ? `${label} ${each[2]}` : each[2]);
    const [cross, tip] = [plot.querySelector(".cross"), plot.querySelector(".tip")];
    plot.classList.add("pointed");
    cross.style.display = tip.style.display = "block";
    cross.style.left = `${100 * at}%`;
    tip.textContent = `step ${step.toLocaleString("en")}: ${values.join(", ")}`;
    tip.style.left = `${Math.max(0, Math.min(at * box.width, box.width - tip.offsetWidth))}px`;
  }

  function hide(plot) {
    plot.classList.remove("pointed");
    for (const each of plot.querySelectorAll(".cross, .tip")) each.style.display = "none";
  }

  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);

  const body = document.body, state = document.getElementById("state"), main = document.querySelector("main");
  if (body.dataset.live === undefined) return;
  const token = new URLSearchParams(location.search).get("token");

  async function look() {
    try {
      const answer = await fetch(`content?token=${encodeURIComponent(token)}&version=${body.dataset.live}`);
      if (answer.status === 200) {
        const closed = [...main.querySelectorAll("details:not([open])")].map(each => each.id);
        const scrolled = [...main.querySelectorAll(".table, .listing")].map(each => each.scrollLeft);
        main.innerHTML = await answer.text();  // our own markup, in which all text is escaped
        body.dataset.live = answer.headers.get("X-Version");
        for (const id of closed) { const each = document.getElementById(id); if (each) each.open = false; }
        main.querySelectorAll(".table, .listing").forEach((each, i) => { each.scrollLeft = scrolled[i] || 0; });
      }
      state.textContent = answer.ok ? "live" : `not live: the server answers ${answer.status}`;
    } catch {
      state.textContent = "not live: the server has ended";
    }
    setTimeout(look, 1000 * SECONDS);
  }

  look();
})();
