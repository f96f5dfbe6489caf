// A camera or a shared screen, and questions about it.

import { Watch } from "./client/antiphon.js";

const $ = (id) => document.getElementById(id);

export class CameraTab {
  constructor(page) {
    this.page = page;
    this.watch = null;
    this.answer = null;
    for (const source of ["camera", "screen"]) $(`watch-${source}`).onclick = () => this.start(source);
    $("watch-stop").onclick = () => this.watch?.stop();
    $("ask").onsubmit = (event) => {
      event.preventDefault();
      this.ask();
    };
  }
  async start(source) {
    this.watch?.stop();
    this.page.clear("camera");
    const watch = new Watch({ key: this.page.key });
    this.watch = watch;
    watch.video.id = "seen";
    watch.video.setAttribute("aria-label", "What is shown");
    $("seen").replaceWith(watch.video);
    watch.on("frames", (frames) => this.paint(frames));
    watch.on("answer", ({ text }) => this.say(text));
    watch.on("error", (error) => this.page.fail("camera", error));
    watch.on("end", (reason) => {
      this.paint();
      if (reason) this.page.lost("camera", "Start it again.", reason);
    });
    watch.video.hidden = true;
    try {
      await watch.start(source);
    } catch (error) {
      if (error.name !== "AbortError") this.page.fail("camera", error);
    }
    this.paint();
  }
  paint({ shown, kept } = { shown: 0, kept: 0 }) {
    const on = Boolean(this.watch?.open);
    $("seen").hidden = !on;
    $("watch-stop").disabled = $("ask-button").disabled = !on;
    $("watch-state").textContent = on ? `Watching: ${shown} frames shown, ${kept} of them new` : "Not watching";
  }
  ask() {
    const text = $("question").value.trim();
    if (!text || !this.watch?.open) return;
    this.line("me", "You", text);
    this.answer = null;
    this.watch.ask(text);
    $("question").value = "";
  }
  say(text) {
    this.answer ??= this.line("them", "Answer", "");
    this.answer.textContent = text;
    $("watch-log").scrollTop = $("watch-log").scrollHeight;
  }
  line(kind, who, text) {
    const p = document.createElement("p"),
      b = document.createElement("b"),
      span = document.createElement("span");
    p.className = kind;
    b.textContent = who;
    span.textContent = text;
    p.append(b, span);
    $("watch-log").append(p);
    $("watch-log").scrollTop = $("watch-log").scrollHeight;
    return span;
  }
}
