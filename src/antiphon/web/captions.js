// Captions only: a transcription session, its words as they become certain.

import { microphone } from "./audio.js";
import { SocketTransport } from "./transports.js";

const $ = (id) => document.getElementById(id);

export class Captions {
  constructor(page) {
    this.page = page;
    this.transport = null;
    $("captions-start").onclick = () => (this.transport ? this.stop() : this.start());
    $("captions-copy").onclick = () => navigator.clipboard?.writeText([...$("captions-log").children].map((p) => p.textContent).join("\n"));
  }
  async start() {
    $("captions-start").disabled = true;
    this.lines = new Map();
    let stream = null;
    try {
      stream = await microphone($("microphone").value, false);
      this.transport = await SocketTransport.open({
        path: "v1/realtime?intent=transcription", key: this.page.key, stream,
        onEvent: (e) => this.on(e), onClose: () => this.closed(),
      });
      const language = $("language").value.trim();
      this.transport.send({
        type: "session.update",
        session: { type: "transcription", audio: { input: { transcription: { model: "default", ...(language ? { language } : {}) } } } },
      });
      $("captions-start").textContent = "Stop"; $("captions-start").setAttribute("aria-pressed", "true");
    } catch (error) { for (const track of stream?.getTracks() ?? []) track.stop(); this.page.fail(error); }
    $("captions-start").disabled = false;
  }
  stop() { const open = this.transport; this.transport = null; open?.close(); this.closed(); }
  closed() { this.transport = null; $("captions-start").textContent = "Start captions"; $("captions-start").setAttribute("aria-pressed", "false"); }
  line(id) {
    if (!this.lines.has(id)) { const p = document.createElement("p"); p.className = "open"; $("captions-log").append(p); this.lines.set(id, p); }
    return this.lines.get(id);
  }
  on(event) {
    if (event.type.endsWith("input_audio_transcription.delta")) this.line(event.item_id).textContent += event.delta;
    else if (event.type.endsWith("input_audio_transcription.completed")) {
      const p = this.line(event.item_id);
      if (event.transcript) { p.textContent = event.transcript; p.className = ""; } else p.remove();
    } else if (event.type === "error") this.page.fail(new Error(event.error.message));
    $("captions-log").scrollTop = $("captions-log").scrollHeight;
  }
}
