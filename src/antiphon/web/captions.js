// The captions tab: a live transcript in large type, to copy and to download.

import { Captions, srt } from "./client/antiphon.js";
import { save } from "./files.js";
import { inWords, keptInView } from "./log.js";

const $ = (id) => document.getElementById(id);

/** Names a language by its code, such as "German". */
const LANGUAGES = new Intl.DisplayNames(["en"], { type: "language" });

export class CaptionsTab {
  constructor(page) {
    this.page = page;
    this.captions = null;
    this.speakers = false; // whether the server labels voices
    this.lines = new Map(); // by item: {node, text, final, from, to}, times in ms since the first start or a clear
    this.elapsed_ms = 0;
    this.offset_ms = 0; // added to the times of these captions
    $("captions-start").onclick = () => (this.captions?.open ? this.captions.stop() : this.start());
    $("captions-copy").onclick = () => navigator.clipboard?.writeText(this.text());
    $("captions-text").onclick = () => save("captions.txt", "text/plain", this.text() + "\n");
    $("captions-srt").onclick = () => save("captions.srt", "application/x-subrip", srt(this.timed()));
    $("captions-clear").onclick = () => this.clear();
    $("captions-full").onclick = () => $("captions-log").requestFullscreen();
    $("captions-size").oninput = () => this.resize();
    $("captions-size").value = localStorage.getItem("antiphon-captions-size") || "2";
    $("language").onchange = () => {
      this.page.clear("captions");
      if (this.captions?.open) this.captions.configure({ language: $("language").value });
    };
    this.resize();
  }
  /** Offer these languages, by their codes. With only one language, “Any” is not offered. */
  offer(codes) {
    const chosen = $("language").value,
      named = codes.map((code) => new Option(LANGUAGES.of(code), code));
    named.sort((a, b) => a.text.localeCompare(b.text));
    $("language").replaceChildren(...(codes.length === 1 ? [] : [new Option("Any", "")]), ...named);
    if (codes.includes(chosen)) $("language").value = chosen;
  }
  resize() {
    const size = $("captions-size").value;
    $("captions-log").style.fontSize = `${size}rem`;
    localStorage.setItem("antiphon-captions-size", size);
  }
  clear() {
    this.lines.clear();
    $("captions-log").replaceChildren();
    this.offset_ms -= this.elapsed_ms;
    this.elapsed_ms = 0;
    this.paint();
  }
  said() {
    return [...this.lines.values()].filter((l) => l.text);
  }
  /** The lines with times. A line under way lasts until now. */
  timed() {
    const timed = this.said().filter((l) => l.from !== null);
    return timed.map((l) => ({ ...l, to: l.to ?? Math.max(this.elapsed_ms, l.from + 1000) }));
  }
  text() {
    return this.said()
      .map((l) => (l.speaker ? `${l.speaker}: ${l.text}` : l.text))
      .join("\n");
  }
  state(text) {
    const on = Boolean(this.captions?.open);
    $("captions-state").textContent = text;
    $("captions-start").textContent = on ? "Stop captions" : "Start captions";
    $("captions-start").setAttribute("aria-pressed", on);
  }
  paint() {
    const none = !this.said().length;
    for (const id of ["captions-copy", "captions-text", "captions-clear"]) $(id).disabled = none;
    $("captions-srt").disabled = !this.timed().length;
  }
  async start() {
    this.page.clear("captions");
    $("captions-start").disabled = true;
    // Times continue where the previous captions ended.
    this.offset_ms = this.elapsed_ms;
    let was = "",
      listening = this.lines.size ? "Listening: your words are added below. “Clear” starts over." : "Listening";
    const captions = new Captions({
      key: this.page.key,
      microphone: $("microphone").value,
      language: $("language").value,
      speakers: this.speakers,
    });
    this.captions = captions;
    captions.on("line", (line) => keptInView($("captions-log"), () => this.show(line)));
    captions.on("error", (error) => this.page.fail("captions", error));
    captions.on("lost", ({ from, to }) => {
      const seconds = Math.ceil((to - from) / 1000);
      this.page.fail("captions", new Error(`The server was away: ${seconds} s of speech are missing.`));
    });
    captions.on("state", ({ state, reason }) => {
      if (state === "listening") this.state(listening);
      if (state === "stopping") this.state("Finishing the last line…");
      // Captions continue without a button, since their readers may not be at this device.
      if (state === "waiting" && was !== state) {
        this.state(`Continues when the server is ready: ${inWords(reason)}`);
        this.page.look();
      }
      was = state;
      listening = "Listening";
    });
    captions.on("end", (reason) => {
      this.state("Stopped");
      if (reason) this.page.fail("captions", new Error(reason[0].toUpperCase() + inWords(reason.slice(1))));
    });
    try {
      await captions.start();
    } catch (error) {
      if (error.name !== "AbortError") this.page.fail("captions", error);
    }
    $("captions-start").disabled = false;
  }
  show({ id, text, final, from, to, speaker }) {
    let line = this.lines.get(id);
    if (final && !text) {
      line?.node.remove();
      this.lines.delete(id);
    } else {
      if (!line) {
        line = { node: document.createElement("p") };
        $("captions-log").append(line.node);
        this.lines.set(id, line);
      }
      const moved = (ms) => (ms === null ? null : Math.max(0, ms + this.offset_ms));
      Object.assign(line, { text, final, speaker, from: moved(from), to: moved(to) });
      line.node.replaceChildren(...(speaker ? [named(speaker)] : []), text);
      line.node.className = final ? "" : "open";
      this.elapsed_ms = Math.max(this.elapsed_ms, line.to ?? 0, line.from ?? 0);
    }
    this.paint();
  }
}

/** The label of a voice, in a colour of its own. The golden angle keeps the hues of all labels apart. */
function named(speaker) {
  const node = document.createElement("b");
  const number = [...speaker].reduce((sum, letter) => sum * 26 + letter.charCodeAt(0) - 64, 0);
  node.className = "speaker";
  node.style.setProperty("--hue", Math.round((number * 137.5) % 360));
  node.textContent = speaker;
  return node;
}
