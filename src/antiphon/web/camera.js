// A camera or a shared screen, and questions about it: frames go out twice a second, answers come back written and spoken.

import { fromPcm16, Player, toBase64 } from "./audio.js";
import { protocols, socketUrl } from "./transports.js";

const $ = (id) => document.getElementById(id);
const EVERY_MS = 500, WIDTH = 960, QUALITY = 0.8, WAV_HEADER = 44;

export class Camera {
  constructor(page) {
    this.page = page;
    this.socket = this.stream = null;
    for (const source of ["camera", "screen"]) $(`watch-${source}`).onclick = () => this.start(source);
    $("watch-stop").onclick = () => this.stop();
    $("ask").onsubmit = (event) => { event.preventDefault(); this.ask(); };
  }
  async start(source) {
    this.stop();
    try {
      const media = navigator.mediaDevices;
      this.stream = source === "camera" ? await media.getUserMedia({ video: { width: { ideal: 1280 } } }) : await media.getDisplayMedia({ video: true });
      this.stream.getVideoTracks()[0].onended = () => this.stop();
      $("seen").srcObject = this.stream;
      await $("seen").play();
      this.player ??= await Player.open();
      const socket = (this.socket = new WebSocket(socketUrl("v1/video/chat/stream"), protocols(this.page.key)));
      await new Promise((resolve, reject) => {
        socket.onopen = resolve;
        socket.onerror = () => reject(new Error("The server did not accept the connection: is the key right, does it have a language model?"));
      });
      socket.onmessage = ({ data }) => this.on(JSON.parse(data));
      socket.onclose = () => { if (this.socket === socket) this.stop(); };
      this.send({ type: "session.config", frame_filter: "blocks", max_frames: 120, max_memory_s: 600 });
      this.began = performance.now();
      this.shown = this.kept = 0;
      this.timer = setInterval(() => this.show(), EVERY_MS);
      this.show();
    } catch (error) { this.stop(); this.page.fail(error); }
    this.paint();
  }
  stop() {
    clearInterval(this.timer);
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    const open = this.socket;
    this.socket = this.stream = null;
    open?.close();
    this.player?.flush();
    $("seen").srcObject = null;
    this.paint();
  }
  paint() {
    const on = Boolean(this.socket);
    $("watch-stop").disabled = $("ask-button").disabled = !on;
    $("watch-state").textContent = on ? `${this.shown ?? 0} frames shown, ${this.kept ?? 0} of them new` : "not watching";
  }
  send(event) { if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(event)); }
  async show() {
    const video = $("seen");
    // A server that is behind is shown less, not later.
    if (!video.videoWidth || this.showing || this.socket?.bufferedAmount > 1 << 20) return;
    this.showing = true;
    const canvas = new OffscreenCanvas(Math.min(WIDTH, video.videoWidth), 0);
    canvas.height = Math.round((canvas.width * video.videoHeight) / video.videoWidth);
    canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
    const blob = await canvas.convertToBlob({ type: "image/jpeg", quality: QUALITY });
    this.send({ type: "video.frame", frame_id: String(this.shown++), pts_ms: Math.round(performance.now() - this.began), data: toBase64(await blob.arrayBuffer()) });
    this.showing = false;
  }
  ask() {
    const text = $("question").value.trim();
    if (!text || !this.socket) return;
    this.player.flush();
    this.line("me", "you", text);
    this.answer = null;
    this.send({ type: "video.query", text });
    $("question").value = "";
  }
  line(kind, who, text) {
    const p = document.createElement("p"), b = document.createElement("b"), span = document.createElement("span");
    p.className = kind; b.textContent = who; span.textContent = text;
    p.append(b, span);
    $("watch-log").append(p);
    $("watch-log").scrollTop = $("watch-log").scrollHeight;
    return span;
  }
  on(event) {
    if (event.type === "video.frame.ack") { this.kept += event.accepted; this.paint(); }
    else if (event.type === "response.start") this.answer = this.line("them", "it", "");
    else if (event.type === "response.text.delta") this.answer.textContent += event.delta;
    else if (event.type === "response.text.done" && this.answer) this.answer.textContent = event.text;
    else if (event.type === "response.audio.delta") this.player.play("answer", fromPcm16(Uint8Array.from(atob(event.data), (c) => c.charCodeAt(0)).subarray(WAV_HEADER)));
    else if (event.type === "error") this.page.fail(new Error(event.detail ? `${event.message}: ${event.detail}` : event.message));
  }
}
