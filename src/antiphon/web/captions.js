// Captions only: a transcription session, its words as they become certain.

import { microphone } from "./audio.js";
import { save, srt } from "./files.js";
import { SocketTransport } from "./transports.js";

const $ = (id) => document.getElementById(id);

export class Captions {
  constructor(page) {
    this.page = page;
    this.transport = null;
    this.lines = new Map(); // by item: {node, from, to, text}, times in ms of the whole page's captions
    this.elapsed_ms = 0;
    $("captions-start").onclick = () => (this.transport ? this.stop() : this.start());
    $("captions-copy").onclick = () => navigator.clipboard?.writeText(this.text());
    $("captions-text").onclick = () => save("captions.txt", "text/plain", this.text() + "\n");
    $("captions-srt").onclick = () => save("captions.srt", "application/x-subrip", srt(this.timed()));
  }
  said() {
    return [...this.lines.values()].filter((l) => l.text);
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
    $("captions-state").textContent = text;
    $("captions-start").textContent = this.transport ? "Stop captions" : "Start captions";
    $("captions-start").setAttribute("aria-pressed", Boolean(this.transport));
  }
  async start() {
    this.page.clear("captions");
    $("captions-start").disabled = true;
    // Another session's times go on where those of the one before ended.
    this.offset_ms = this.elapsed_ms;
    let stream = null;
    try {
      stream = await microphone($("microphone").value, false);
      this.transport = await SocketTransport.open({
        path: "v1/realtime?intent=transcription",
        key: this.page.key,
        stream,
        onEvent: (e) => this.on(e),
        onClose: (reason) => this.closed(reason),
      });
      const language = $("language").value.trim();
      this.transport.send({
        type: "session.update",
        session: {
          type: "transcription",
          audio: { input: { transcription: { model: "default", ...(language ? { language } : {}) } } },
        },
      });
      this.state("Listening");
    } catch (error) {
      for (const track of stream?.getTracks() ?? []) track.stop();
      this.page.fail("captions", error);
    }
    $("captions-start").disabled = false;
  }
  stop() {
    const open = this.transport;
    this.transport = null;
    open?.close();
    this.closed("");
  }
  closed(reason) {
    this.transport = null;
    this.state(reason ? `Stopped: ${reason}` : "Stopped");
  }
  line(id) {
    if (!this.lines.has(id)) {
      const node = document.createElement("p");
      node.className = "open";
      $("captions-log").append(node);
      this.lines.set(id, { node, from: null, to: null, text: "" });
    }
    return this.lines.get(id);
  }
  at(ms) {
    this.elapsed_ms = this.offset_ms + ms;
    return this.elapsed_ms;
  }
  on(event) {
    if (event.type === "input_audio_buffer.speech_started")
      this.line(event.item_id).from = this.at(event.audio_start_ms);
    else if (event.type === "input_audio_buffer.speech_stopped")
      this.line(event.item_id).to = this.at(event.audio_end_ms);
    else if (event.type.endsWith("input_audio_transcription.delta"))
      this.line(event.item_id).node.textContent += event.delta;
    else if (event.type.endsWith("input_audio_transcription.completed")) {
      const line = this.line(event.item_id);
      line.text = line.node.textContent = event.transcript;
      line.node.className = "";
      if (!event.transcript) {
        line.node.remove();
        this.lines.delete(event.item_id);
      }
    } else if (event.type === "error") this.page.fail("captions", new Error(event.error.message));
    $("captions-copy").disabled = $("captions-text").disabled = !this.said().length;
    $("captions-srt").disabled = !this.timed().length;
    $("captions-log").scrollTop = $("captions-log").scrollHeight;
  }
}
