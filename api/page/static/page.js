"use strict";
// Two things: sends what an operator does to the API's routes, and loads parts of the page anew when the
// server says that something changed.

const told = document.getElementById("told");
const main = document.getElementById("main");
const ask = document.getElementById("ask");
const token = document.querySelector("meta[name=csrf-token]").content;

function tell(text, failed) {
  told.textContent = text;
  told.className = failed ? "problem" : "done";
}

// The reason that somebody gives for an act; null when he leaves it.
function askFor(question, reason) {
  document.getElementById("ask-what").textContent = question;
  const why = ask.querySelector("[name=reason]");
  document.getElementById("ask-why").hidden = !reason;
  why.disabled = !reason;
  why.value = "";
  ask.returnValue = "";
  ask.showModal();
  return new Promise((resolve) => {
    ask.addEventListener("close", () => resolve(ask.returnValue ? why.value : null), { once: true });
  });
}

// The fields of a form as JSON: numbers stay numbers, what is empty is left out.
function bodyOf(form) {
  const body = JSON.parse(form.dataset.body || "{}");
  for (const field of form.elements) {
    if (!field.name || field.disabled || field.value === "" || field.dataset.path !== undefined) continue;
    if (field.type === "checkbox") body[field.name] = field.checked;
    else if (field.dataset.number !== undefined) body[field.name] = Number(field.value);
    else body[field.name] = field.value;
  }
  return body;
}

async function act(form) {
  const [method, url] = form.dataset.act.split(" ");
  const body = bodyOf(form);
  // A field marked `data-path` stands in the address, where its name is in braces.
  let address = url;
  for (const field of form.querySelectorAll("[data-path]")) {
    address = address.replace("{" + field.name + "}", encodeURIComponent(field.value.trim()));
  }
  tell("", false);
  if (form.dataset.ask) {
    const reason = await askFor(form.dataset.ask, form.dataset.reason !== undefined);
    if (reason === null) return;
    if (form.dataset.reason !== undefined) body.reason = reason;
  }
  const request = { method, headers: { "X-CSRF-Token": token } };
  if (method === "DELETE") {
    address += "?" + new URLSearchParams(body);
  } else if (Object.keys(body).length) {
    request.headers["Content-Type"] = "application/json";
    request.body = JSON.stringify(body);
  }
  const buttons = form.querySelectorAll("button");
  buttons.forEach((one) => one.setAttribute("aria-disabled", "true"));
  tell("Sent …", false);
  try {
    const answer = await fetch(address, request);
    const found = (answer.headers.get("Content-Type") || "").includes("json") ? await answer.json() : {};
    if (answer.ok) {
      if (form.dataset.then) return location.assign(form.dataset.then);
      const still = found.also && found.state === "open" ? " It is not open yet: " + found.also : "";
      tell((answer.status === 202 ? "Taken on; it goes on by itself." : "Done.") + still, false);
    } else {
      const where = (found.errors || []).map((one) => one.loc.at(-1) + ": " + one.msg).join("; ");
      tell([found.title, found.detail, where].filter(Boolean).join(" ") || "HTTP " + answer.status, true);
    }
  } catch {
    tell("The API cannot be reached. Look at what was done before you repeat it.", true);
  } finally {
    buttons.forEach((one) => one.removeAttribute("aria-disabled"));
  }
  refresh();
}

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.dataset.act === undefined) return;
  event.preventDefault();
  if (!form.querySelector("[aria-disabled]")) act(form);
});

const stale = document.getElementById("stale");
let upToDate = new Date();
let later = 0;

// Says since when the page is not what the server has, and tries again.
function tellStale() {
  const clock = { hour: "2-digit", minute: "2-digit", timeZone: document.body.dataset.zone, hourCycle: "h23" };
  stale.textContent = "Not up to date since " + upToDate.toLocaleTimeString("en-GB", clock) + ".";
  clearTimeout(later);
  later = setTimeout(refresh, 5000);
}

let loading = false;
let again = false;

// Replaces the parts of the page by those of a new answer; an open <details> stays open.
async function refresh() {
  if (loading) {
    again = true;
    return;
  }
  loading = true;
  try {
    const answer = await fetch(location.href, {
      headers: { Accept: "text/html" },
      signal: AbortSignal.timeout(20000),
    });
    if (answer.redirected) return location.reload();
    if (!answer.ok) return tellStale();
    const found = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of main.querySelectorAll("[data-part]")) {
      const fresh = found.querySelector(`[data-part="${part.dataset.part}"]`);
      if (!fresh || fresh.innerHTML === part.dataset.shown) continue;
      if (part.contains(document.activeElement) && document.activeElement !== document.body) {
        if (/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) continue;
      }
      const open = [...part.querySelectorAll("details[open]")].map((one) => one.id);
      const focused = [...part.querySelectorAll("a, button, [tabindex], summary")].indexOf(document.activeElement);
      part.dataset.shown = fresh.innerHTML;
      part.replaceChildren(...fresh.childNodes);
      for (const id of open) part.querySelector("#" + id)?.setAttribute("open", "");
      if (focused >= 0) part.querySelectorAll("a, button, [tabindex], summary")[focused]?.focus();
    }
    upToDate = new Date();
    stale.textContent = "";
  } catch {
    tellStale();
  } finally {
    setTimeout(() => {
      loading = false;
      if (again) {
        again = false;
        refresh();
      }
    }, 500);
  }
}

// Temporal's index is a moment behind the change that we hear of: so a second look.
function changed() {
  refresh();
  clearTimeout(later);
  later = setTimeout(refresh, 2000);
}

let streams = [];
function follow() {
  streams.forEach((one) => one.close());
  streams = [];
  // A tab that nobody sees holds no connection: a browser has six for one server.
  if (document.hidden) return;
  for (const url of main.dataset.events.split(" ").filter(Boolean)) {
    const stream = new EventSource(url);
    for (const name of ["begin", "change", "state", "transition", "orders", "order"]) {
      stream.addEventListener(name, changed);
    }
    // A browser comes back by itself when a connection breaks, but not when it is refused one.
    stream.addEventListener("error", () => {
      refresh();
      if (stream.readyState !== EventSource.CLOSED) return;
      setTimeout(follow, 5000);
    });
    streams.push(stream);
  }
}
document.addEventListener("visibilitychange", follow);
follow();
if (main.dataset.every) setInterval(() => document.hidden || refresh(), 1000 * main.dataset.every);
