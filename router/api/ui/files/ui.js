// Updates the served page in place, and adds what needs a script: hold, filter, keys.
// Without scripts, the page is complete, and the browser reloads it every five seconds.
"use strict";

const INTERVAL_MS = 2000;
const controls = document.getElementById("controls");
let isHeld = false;
let isLoading = false;

function make(tag, properties) {
  return Object.assign(document.createElement(tag), properties);
}

const state = make("span", { className: "dim small", id: "live", textContent: "live" });
const hold = make("button", { type: "button", textContent: "Hold" });
controls.append(state, hold);
hold.setAttribute("aria-pressed", "false");

const rows = () => document.querySelectorAll("table.filtered tbody tr");
let filter = null;
if (rows().length || document.getElementById("nodes")) {
  filter = make("input", { type: "search", placeholder: "Filter", autocomplete: "off" });
  filter.setAttribute("aria-label", "Show rows of nodes, pairs and requests with this text only");
  filter.addEventListener("input", applyFilter);
  controls.prepend(filter);
}

function applyFilter() {
  const words = filter ? filter.value.toLowerCase() : "";
  for (const row of rows()) {
    row.hidden = !row.textContent.toLowerCase().includes(words);
    row.style.display = row.hidden ? "none" : "";
  }
}

function setHeld(held) {
  isHeld = held;
  hold.textContent = held ? "Go on" : "Hold";
  hold.setAttribute("aria-pressed", String(held));
  state.textContent = held ? "held" : "live";
}

hold.addEventListener("click", () => setHeld(!isHeld));

async function refresh() {
  if (isHeld || isLoading || document.hidden || String(getSelection())) {
    return;
  }
  isLoading = true;
  try {
    const answer = await fetch(location.pathname + location.search, { cache: "no-store" });
    if (!answer.ok) {
      throw new Error(answer.status + " " + answer.statusText);
    }
    const found = new DOMParser().parseFromString(await answer.text(), "text/html");
    const focused = document.activeElement && document.activeElement.getAttribute("href");
    for (const part of document.querySelectorAll("[data-live]")) {
      const fresh = found.querySelector(`[data-live="${part.dataset.live}"]`);
      if (fresh && fresh.innerHTML !== part.innerHTML) {
        part.innerHTML = fresh.innerHTML;
      }
    }
    applyFilter();
    if (focused && document.activeElement === document.body) {
      const again = document.querySelector(`a[href="${CSS.escape(focused)}"]`);
      if (again) {
        again.focus({ preventScroll: true });
      }
    }
    document.body.classList.remove("stale");
    if (!isHeld) {
      state.textContent = "live";
    }
  } catch (error) {
    document.body.classList.add("stale");
    state.textContent = "the router does not answer";
  } finally {
    isLoading = false;
  }
}

document.addEventListener("keydown", (event) => {
  const isTyping = event.target instanceof HTMLInputElement;
  if (event.key === "Escape" && isTyping) {
    filter.value = "";
    applyFilter();
    filter.blur();
  }
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) {
    return;
  }
  if (event.key === "p") {
    setHeld(!isHeld);
  } else if (event.key === "/" && filter) {
    event.preventDefault();
    filter.focus();
  } else if (/^[1-9]$/.test(event.key)) {
    const link = document.querySelectorAll("nav a")[Number(event.key) - 1];
    if (link) {
      link.click();
      link.focus({ preventScroll: true });
    }
  }
});

setInterval(refresh, INTERVAL_MS);
