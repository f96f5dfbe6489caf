// The page: tabs, the key, what the server has; each tab is a file of its own.

import { Camera } from "./camera.js";
import { Captions } from "./captions.js";
import { INSECURE, NO_KEY, withKey, WRONG_KEY } from "./errors.js";
import { Speech } from "./speech.js";
import { Talk } from "./talk.js";

const $ = (id) => document.getElementById(id);

const page = {
  voices: [],
  get key() {
    return $("key").value.trim();
  },
  /** Say beside the button of a tab what went wrong. */
  fail(tab, error) {
    $(`${tab}-error`).textContent = error.message || String(error);
    console.error(error);
  },
  clear(tab) {
    $(`${tab}-error`).textContent = "";
  },
  /** Names of devices are known once a microphone may be used. */
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
    "it cannot tell things or people.",
  pictures: "This server’s model sees the pictures: ask about anything in them.",
  none: "This server has no model that answers questions about a picture.",
};

const get = (path, key) => fetch(path, { headers: withKey(key) });

/** The models, if this page may see them; the field of the key is there only where the server wants one. */
async function models() {
  let answer = await get("v1/models", "");
  const wanted = answer.status === 401;
  $("key-field").hidden = !wanted;
  if (wanted) {
    if (!page.key) {
      $("status").textContent = NO_KEY;
      return null;
    }
    answer = await get("v1/models", page.key);
    if (answer.status === 401) {
      $("status").textContent = WRONG_KEY;
      return null;
    }
  }
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return (await answer.json()).data;
}

async function look() {
  try {
    const ready = await fetch("ready").then((r) => r.json());
    if (ready.status !== "ready") {
      $("status").textContent = `Not ready yet: ${ready.status}`;
      setTimeout(look, 1000);
      return;
    }
    const loaded = await models();
    if (!loaded) return;
    $("sight").textContent = SIGHT[loaded.find((m) => m.video)?.video ?? "none"];
    const answer = await get("v1/audio/voices", page.key);
    // A server without a synthesizer has no voices, and is ready.
    page.voices = answer.ok ? (await answer.json()).voices.map((v) => v.name ?? v) : [];
    for (const id of ["voice", "speech-voice"]) $(id).replaceChildren(...page.voices.map((v) => new Option(v, v)));
    $("status").textContent = `Ready: ${ready.models.join(", ")}`;
  } catch {
    $("status").textContent = "The server does not answer";
    setTimeout(look, 2000);
  }
}

const tabs = [...document.querySelectorAll("[role=tab]")];
function choose(tab) {
  for (const t of tabs) {
    const on = t === tab;
    t.setAttribute("aria-selected", on);
    t.tabIndex = on ? 0 : -1;
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
$("key").onchange = () => {
  sessionStorage.setItem("antiphon-key", page.key);
  look();
};
if (!navigator.mediaDevices) for (const tab of ["talk", "captions", "camera"]) page.fail(tab, new Error(INSECURE));
new Talk(page);
new Captions(page);
new Speech(page);
new Camera(page);
look();
