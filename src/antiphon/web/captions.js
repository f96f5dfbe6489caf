// Captions only: the words of the microphone in large type, to copy and to keep.

import { Captions } from "./client/antiphon.js";
import { save, srt } from "./files.js";
import { keptInView } from "./log.js";

const $ = (id) => document.getElementById(id);

export class CaptionsTab {
  constructor(page) {
    this.page = page;
    this.captions = null;
    this.lines = new Map(); // by item: {node, from, to, text}, times in ms of the whole page's captions
    this.elapsed_ms = 0;
    this.failures = 0; // how often they ended one after the other without a word
    $("captions-start").onclick = () => (this.captions?.open ? this.captions.stop() : this.start());
    $("captions-copy").onclick = () => navigator.clipboard?.writeText(this.text());
    $("captions-text").onclick = () => save("captions.txt", "text/plain", this.text() + "\n");
    $("captions-srt").onclick = () => save("captions.srt", "application/x-subrip", srt(this.timed()));
    $("captions-full").onclick = () => $("captions-log").requestFullscreen();
    $("captions-size").oninput = () => this.resize();
    $("captions-size").value = localStorage.getItem("antiphon-captions-size") || "2";
    this.resize();
  }
  resize() {
    const size = $("captions-size").value;
    $("captions-log").style.fontSize = `${size}rem`;
    localStorage.setItem("antiphon-captions-size", size);
  }
  said() {
    return [...this.lines.values()].filter((l) => l.final && l.text);
  }
  timed() {
    return this.said().filter((l) => l.to !== null);
  }
  text() {
    return this.said()
      .map((l) => l.text)
      .join("\n");
  }
  state(text) {
    const on = Boolean(this.captions?.open);
    $("captions-state").textContent = text;
    $("captions-start").textContent = on ? "Stop captions" : "Start captions";
    $("captions-start").setAttribute("aria-pressed", on);
  }
  async start() {
    this.page.clear("captions");
    $("captions-start").disabled = true;
    // Another session's times go on where those of the one before ended.
    const offset_ms = this.elapsed_ms;
    const captions = new Captions({
      key: this.page.key,
      microphone: $("microphone").value,
      language: $("language").value.trim(),
    });
    this.captions = captions;
    captions.on("line", (line) => {
      this.failures = 0;
      keptInView($("captions-log"), () => this.show(line, offset_ms));
    });
    captions.on("error", (error) => this.page.fail("captions", error));
    captions.on("end", (reason) => {
      this.state(reason ? `Stopped: ${reason.replaceAll("_", " ")}` : "Stopped");
      // Whoever reads captions cannot press a button: they go on by themselves once the server is back.
      if (reason) {
        this.failures += 1;
        const again = () => this.captions === captions && !captions.open && this.start();
        this.page.lost("captions", "It goes on once the server is ready.", reason, again, this.failures);
      }
    });
    try {
      await captions.start();
      this.state("Listening");
    } catch (error) {
      if (error.name !== "AbortError") this.page.fail("captions", error);
    }
    $("captions-start").disabled = false;
  }
  show({ id, text, final, from, to }, offset_ms) {
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
      const shifted = (ms) => (ms === null ? null : ms + offset_ms);
      Object.assign(line, { text, final, from: shifted(from), to: shifted(to) });
      line.node.textContent = text;
      line.node.className = final ? "" : "open";
      this.elapsed_ms = Math.max(this.elapsed_ms, line.to ?? 0, line.from ?? 0);
    }
    $("captions-copy").disabled = $("captions-text").disabled = !this.said().length;
    $("captions-srt").disabled = !this.timed().length;
  }
}
