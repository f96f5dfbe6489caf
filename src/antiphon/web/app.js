// The page: tabs, the key, what the server has; each tab is a file of its own.

import { Camera } from "./camera.js";
import { Captions } from "./captions.js";
import { Speech } from "./speech.js";
import { Talk } from "./talk.js";

const $ = (id) => document.getElementById(id);

const page = {
  voices: [],
  get key() { return $("key").value.trim(); },
  fail(error) { $("error").textContent = error.message || String(error); console.error(error); },
  /** Names of devices are known once a microphone may be used. */
  async listDevices() {
    const devices = await navigator.mediaDevices.enumerateDevices();
    for (const [id, kind] of [["microphone", "audioinput"], ["loudspeaker", "audiooutput"]]) {
      const chosen = $(id).value, mine = devices.filter((d) => d.kind === kind && d.deviceId && d.deviceId !== "default");
      $(id).replaceChildren(new Option("default", ""), ...mine.map((d, k) => new Option(d.label || `${id} ${k + 1}`, d.deviceId)));
      $(id).value = chosen;
    }
  },
};

async function get(path) {
  const answer = await fetch(path, page.key ? { headers: { Authorization: `Bearer ${page.key}` } } : {});
  if (!answer.ok) throw Object.assign(new Error(`${answer.status}`), { status: answer.status });
  return answer.json();
}

async function look() {
  try {
    const ready = await fetch("ready").then((r) => r.json());
    $("status").textContent = ready.status === "ready" ? `ready: ${ready.models.join(", ")}` : ready.status;
    if (ready.status !== "ready") { setTimeout(look, 1000); return; }
    const { voices } = await get("v1/audio/voices");
    page.voices = voices.map((v) => v.name ?? v);
    for (const id of ["voice", "speech-voice"]) $(id).replaceChildren(...page.voices.map((v) => new Option(v, v)));
    $("error").textContent = "";
  } catch (error) {
    $("status").textContent = error.status === 401 ? "this server wants an API key" : "the server does not answer";
    if (error.status !== 401) setTimeout(look, 2000);
  }
}

const tabs = [...document.querySelectorAll("[role=tab]")];
function choose(tab) {
  for (const t of tabs) {
    const on = t === tab;
    t.setAttribute("aria-selected", on); t.tabIndex = on ? 0 : -1;
    $(t.getAttribute("aria-controls")).hidden = !on;
  }
  tab.focus();
}
tabs.forEach((tab, k) => {
  tab.onclick = () => choose(tab);
  tab.onkeydown = ({ key }) => {
    const to = { ArrowRight: k + 1, ArrowLeft: k - 1, Home: 0, End: tabs.length - 1 }[key];
    if (to !== undefined) choose(tabs[(to + tabs.length) % tabs.length]);
  };
});

$("key").value = sessionStorage.getItem("antiphon-key") || "";
$("key").onchange = () => { sessionStorage.setItem("antiphon-key", page.key); look(); };
if (!navigator.mediaDevices) page.fail(new Error("A browser gives the microphone only to https pages and to localhost."));
new Talk(page); new Captions(page); new Speech(page); new Camera(page);
look();
