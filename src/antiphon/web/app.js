// The page: its tabs, the API key, and the server's state. Each tab has its own file; all use client/antiphon.js.

import { CameraTab } from "./camera.js";
import { CaptionsTab } from "./captions.js";
import { INSECURE, NO_KEY, withKey, WRONG_KEY } from "./client/errors.js";
import { inWords } from "./log.js";
import { ServerTab } from "./server.js";
import { SpeechTab } from "./speech.js";
import { Talk } from "./talk.js";

const $ = (id) => document.getElementById(id);
const AT_THE_TOP = {
  [NO_KEY]: "Enter it at the top of this page.",
  [WRONG_KEY]: "Correct it at the top of this page.",
};

const page = {
  voices: [],
  get key() {
    return $("key").value.trim();
  },
  /** Show an error next to the button of a tab. */
  fail(tab, error) {
    const said = error.message || String(error),
      text = AT_THE_TOP[said] ? `${said} ${AT_THE_TOP[said]}` : said,
      place = $(`${tab}-error`);
    if (place.textContent === text) return;
    place.textContent = text;
    console.error(error);
  },
  clear(tab) {
    $(`${tab}-error`).textContent = "";
  },
  /** The key is valid now: clear the errors about it on all tabs. */
  clearKey() {
    for (const tab of Object.keys(NEEDS)) {
      const said = $(`${tab}-error`).textContent;
      if (said.startsWith(NO_KEY) || said.startsWith(WRONG_KEY)) this.clear(tab);
    }
  },
  /** Check the server's state now. */
  look: () => look(),
  /** Show that a session ended by itself, and what to do. */
  lost(tab, advice, reason) {
    this.fail(tab, new Error(`The session ended: ${inWords(reason)}. ${advice}`));
    look();
  },
  /** List the devices. Browsers reveal their names only after the user has allowed a microphone. */
  async listDevices() {
    const devices = await navigator.mediaDevices.enumerateDevices();
    for (const [id, kind] of [
      ["microphone", "audioinput"],
      ["loudspeaker", "audiooutput"],
    ]) {
      const chosen = $(id).value,
        mine = devices.filter((d) => d.kind === kind && d.deviceId && d.deviceId !== "default");
      $(id).replaceChildren(
        new Option("Default", ""),
        ...mine.map((d, k) => new Option(d.label || `${id} ${k + 1}`, d.deviceId)),
      );
      $(id).value = chosen;
    }
  },
};

const SIGHT = {
  text:
    "This server has no model that sees pictures. It reads text in them and notices movement, light and colours; " +
    "it cannot recognize things or people.",
  pictures: "This server’s model sees the pictures: ask about anything in them.",
  none: "This server has no model that answers questions about a picture.",
};

// For each tab: the feature of the server that it needs, the message if it is missing, and the extra to install.
const NEEDS = {
  talk: ["conversation", "no language model: it cannot answer", "talk"],
  captions: ["captions", "no model that transcribes", ""],
  speech: ["speech", "no voice: it cannot speak", "speech"],
  camera: ["video", "no model that answers about pictures", "video"],
};

const get = (path, key) => fetch(path, { headers: withKey(key) });

/** Fetch the models; null if the key is missing or wrong. Shows the field for the key only if the server needs one. */
async function models() {
  let answer = await get("v1/models", "");
  const wanted = answer.status === 401;
  $("key-field").hidden = !wanted;
  if (wanted) {
    if (!page.key) {
      $("status").textContent = `${NO_KEY} ${AT_THE_TOP[NO_KEY]}`;
      return null;
    }
    answer = await get("v1/models", page.key);
    if (answer.status === 401) {
      $("status").textContent = `${WRONG_KEY} ${AT_THE_TOP[WRONG_KEY]}`;
      return null;
    }
  }
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return (await answer.json()).data;
}

/** Show on each tab what the server lacks for it. A server without this information counts as complete. */
function lacks(serves) {
  for (const [tab, [kind, missing, extra]] of Object.entries(NEEDS)) {
    const absent = Boolean(serves) && !serves.includes(kind);
    const packages = extra ? ` Run pip install '.[${extra}]' in its clone, and start it again.` : "";
    $(`${tab}-lacks`).textContent = absent ? `This server has ${missing}.${packages}` : "";
    document.querySelector(`#${tab} button.main`).disabled = absent;
  }
}

let looking = null;

/** Check every 10 s that the server is still ready. */
async function watch() {
  const answer = await fetch("ready").catch(() => null);
  if (answer?.ok) looking = setTimeout(watch, 10000);
  else look();
}

async function look() {
  clearTimeout(looking);
  $("status").className = "";
  try {
    const ready = await fetch("ready").then((r) => r.json());
    if (ready.status !== "ready") {
      $("status").textContent = `Not ready yet: ${ready.status}`;
      looking = setTimeout(look, 1000);
      return;
    }
    const loaded = await models();
    if (!loaded) return;
    page.clearKey();
    lacks(ready.serves);
    captions.speakers = ready.labels_speakers === true;
    captions.offer(loaded.find((m) => m.task === "automatic-speech-recognition")?.languages ?? []);
    $("sight").textContent = SIGHT[loaded.find((m) => m.video)?.video ?? "none"];
    const answer = await get("v1/audio/voices", page.key);
    // A server without a synthesizer has no voices, and is ready.
    page.voices = answer.ok ? (await answer.json()).voices.map((v) => v.id ?? v.name ?? v) : [];
    for (const id of ["voice", "speech-voice"]) {
      const chosen = $(id).value;
      $(id).replaceChildren(...page.voices.map((v) => new Option(v, v)));
      if (page.voices.includes(chosen)) $(id).value = chosen;
    }
    $("status").textContent = `Ready: ${ready.models.join(", ")}`;
    $("status").className = "ready";
    looking = setTimeout(watch, 10000);
  } catch {
    $("status").textContent = "The server does not answer";
    looking = setTimeout(look, 2000);
  }
}

// --- tabs ------------------------------------------------------------------------------------------------------------

const tabs = [...document.querySelectorAll("[role=tab]")];
function choose(tab) {
  for (const t of tabs) {
    const on = t === tab;
    t.setAttribute("aria-selected", on);
    t.tabIndex = on ? 0 : -1;
    $(t.getAttribute("aria-controls")).hidden = !on;
  }
  server.shown(tab.id === "tab-server");
  tab.focus();
}
tabs.forEach((tab, k) => {
  tab.onclick = () => choose(tab);
  tab.onkeydown = ({ key }) => {
    const to = { ArrowRight: k + 1, ArrowLeft: k - 1, Home: 0, End: tabs.length - 1 }[key];
    if (to !== undefined) choose(tabs[(to + tabs.length) % tabs.length]);
  };
});

// --- light and dark --------------------------------------------------------------------------------------------------

function paint() {
  const theme = $("theme").value;
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("antiphon-theme", theme);
}
$("theme").value = localStorage.getItem("antiphon-theme") || "";
$("theme").onchange = paint;
paint();

$("key").value = sessionStorage.getItem("antiphon-key") || "";
$("key").onchange = () => {
  sessionStorage.setItem("antiphon-key", page.key);
  look();
};
new Talk(page);
const captions = new CaptionsTab(page);
new SpeechTab(page);
new CameraTab(page);
const server = new ServerTab(page);
if (!navigator.mediaDevices) for (const tab of ["talk", "captions", "camera"]) page.fail(tab, new Error(INSECURE));
look();
