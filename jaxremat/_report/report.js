// Shows what is in memory at the moment under the pointer. `.moments` holds, for each picture, its moments as
// [seconds, running, forward, recomputed, backward, scratch, [[group, count], ...]], and the groups that they name as
// [name, shape, kind, bytes, module, line]; of copies to the host's memory and back `.copies` has
// [group, whether back, begin, end].
(() => {
  "use strict";
  const KINDS = ["forward", "recomputed", "backward"];
  const PASSES = ["forward pass", "recomputation", "backward pass"];
  const three = (x) => x.toFixed(x < 9.995 ? 2 : x < 99.95 ? 1 : 0);
  const bytes = (n) => {
    const units = ["B", "KiB", "MiB", "GiB"];
    while (units.length > 1 && n >= 1023.5) { n /= 1024; units.shift(); }
    return (units[0] === "B" ? n.toFixed(0) : three(n)) + " " + units[0];
  };
  const time = (s) => {
    for (const [unit, scale] of [["s", 1], ["ms", 1e-3], ["us", 1e-6]]) {
      if (s >= 0.9995 * scale) return three(s / scale) + " " + unit;
    }
    return s ? three(s / 1e-9) + " ns" : "0 s";
  };
  const element = (tag, text, kind) => {
    const made = document.createElement(tag);
    if (text) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };

  const ready = (root) => {
    const data = JSON.parse(root.querySelector(".moments").textContent);
    const longest = Math.max(...data.runs.map((run) => run.seconds)) || 1;
    for (const plot of root.querySelectorAll(".plot")) {
      const run = data.runs[plot.dataset.run], moments = run.moments;
      const area = plot.querySelector(".area"), tip = plot.querySelector(".tip"), cursor = plot.querySelector(".cursor");
      let at = -1;
      if (!moments.length) continue;
      plot.setAttribute("aria-valuemax", moments.length - 1);

      const show = (i) => {
        at = Math.max(0, Math.min(moments.length - 1, i));
        const [seconds, running, forward, recomputed, backward, scratch, alive] = moments[at];
        const until = at + 1 < moments.length ? moments[at + 1][0] : run.seconds;
        const place = (50 * (seconds + until)) / longest;
        const total = data.base + forward + recomputed + backward + scratch;
        const [name, shape, kind, , module, line] = data.groups[running];
        tip.replaceChildren();
        const head = element("p");
        head.append(element("b", bytes(total)), ` at ${time(seconds)}, in the ${PASSES[kind]}`);
        const now = element("p", `runs ${name} ${shape} `);
        now.append(element("small", [line, module].filter(Boolean).join(", ")));
        tip.append(head, now);
        for (const [group, back, begin, end] of run.copies) {
          if (end <= seconds || begin >= until) continue;
          const [what, form] = data.groups[group];
          const way = element("p");
          way.append(element("i", "", "swatch offload"), `${back ? "from" : "to"} host: ${what} ${form}`);
          tip.append(way);
        }
        const list = element("ul");
        const add = (n, swatch, text, small) => {
          const item = element("li"), what = element("span");
          what.append(element("i", "", "swatch " + swatch), element("span", text + " "), element("small", small));
          item.append(element("b", bytes(n), "n"), what);
          list.append(item);
        };
        let rest = forward + recomputed + backward;
        for (const [group, count] of alive) {
          const [what, form, made, each, where, source] = data.groups[group];
          rest -= each * count;
          add(each * count, KINDS[made], (count > 1 ? count + " × " : "") + what + " " + form,
            [source, where].filter(Boolean).join(", "));
        }
        if (rest > 0) add(rest, "none", "smaller values", "");
        if (scratch > 0) add(scratch, "scratch", "scratch of the running kernel", "");
        add(data.base, "base", "arguments and outputs", "");
        tip.append(list);
        tip.hidden = cursor.hidden = false;
        cursor.style.left = place + "%";
        tip.style.left = place < 50 ? `calc(${place}% + 14px)` : "auto";
        tip.style.right = place < 50 ? "auto" : `calc(${100 - place}% + 14px)`;
        plot.setAttribute("aria-valuenow", at);
        plot.setAttribute("aria-valuetext", tip.innerText);
      };
      const hide = () => { tip.hidden = cursor.hidden = true; };
      const point = (event) => {
        const box = area.getBoundingClientRect();
        const seconds = ((event.clientX - box.left) / box.width) * longest;
        let low = 0, high = moments.length - 1;
        while (low < high) {
          const middle = (low + high + 1) >> 1;
          if (moments[middle][0] <= seconds) low = middle; else high = middle - 1;
        }
        if (seconds > run.seconds) hide(); else show(low);
      };
      area.addEventListener("pointermove", point);
      area.addEventListener("pointerdown", point);
      area.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
      plot.addEventListener("blur", hide);
      plot.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10 }[event.key];
        if (event.key === "Escape") hide();
        else if (event.key === "Home") show(0);
        else if (event.key === "End") show(moments.length - 1);
        else if (step) show(at + step);
        else return;
        event.preventDefault();
      });
    }
    const closed = [];
    addEventListener("beforeprint", () => {
      for (const part of root.querySelectorAll("details:not([open])")) { part.open = true; closed.push(part); }
    });
    addEventListener("afterprint", () => { for (const part of closed.splice(0)) part.open = false; });
  };
  for (const root of document.querySelectorAll(".jaxremat:not([data-ready])")) {
    root.dataset.ready = "";
    ready(root);
  }
})();
