// A camera or a shared screen, and questions about it: frames go out twice a second, answers come back written
// and spoken.

import { fromPcm16, Player, toBase64 } from "./audio.js";
import { device, openSocket } from "./errors.js";
import { protocols, socketUrl } from "./transports.js";

const $ = (id) => document.getElementById(id);
const EVERY_MS = 500,
  WIDTH = 960,
  QUALITY = 0.8,
  WAV_HEADER = 44;

export class Camera {
  constructor(page) {
    this.page = page;
    this.socket = this.stream = null;
    this.starts = 0;
    for (const source of ["camera", "screen"]) $(`watch-${source}`).onclick = () => this.start(source);
    $("watch-stop").onclick = () => this.stop();
    $("ask").onsubmit = (event) => {
      event.preventDefault();
      this.ask();
    };
  }
  async start(source) {
    this.stop();
    this.page.clear("camera");
    // A start that was overtaken by another, or by a stop, gives back what it was given.
    const mine = this.starts;
    const still = () => {
      if (mine !== this.starts) throw Object.assign(new Error("overtaken"), { overtaken: true });
    };
    let stream = null,
      socket = null;
    try {
      stream =
        source === "camera"
          ? await device("camera", (media) => media.getUserMedia({ video: { width: { ideal: 1280 } } }))
          : await device("screen", (media) => media.getDisplayMedia({ video: true }));
      still();
      this.player ??= await Player.open();
      const { key } = this.page;
      socket = await openSocket(socketUrl("v1/video/chat/stream"), protocols(key), key, "it has no language model");
      still();
      Object.assign(this, { stream, socket, answer: null });
      stream.getVideoTracks()[0].onended = () => this.stop();
      $("seen").srcObject = stream;
      await $("seen").play();
      still();
      socket.onmessage = ({ data }) => this.on(JSON.parse(data));
      socket.onclose = () => {
        if (this.socket === socket) this.stop();
      };
      this.send({ type: "session.config", frame_filter: "blocks", max_frames: 120, max_memory_s: 600 });
      this.began = performance.now();
      this.shown = this.kept = 0;
      this.timer = setInterval(() => this.show(), EVERY_MS);
      this.show();
    } catch (error) {
      for (const track of stream?.getTracks() ?? []) track.stop();
      socket?.close();
      if (!error.overtaken) {
        this.stop();
        this.page.fail("camera", error);
      }
    }
    this.paint();
  }
  stop() {
    this.starts += 1;
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
    $("seen").hidden = !on;
    $("watch-stop").disabled = $("ask-button").disabled = !on;
    $("watch-state").textContent = on
      ? `Watching: ${this.shown ?? 0} frames shown, ${this.kept ?? 0} of them new`
      : "Not watching";
  }
  send(event) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(event));
  }
  async show() {
    const video = $("seen");
    // A server that is behind is shown less, not later.
    if (!video.videoWidth || this.showing || this.socket?.bufferedAmount > 1 << 20) return;
    this.showing = true;
    try {
      await this.shot(video);
    } catch (error) {
      this.page.fail("camera", error);
    } finally {
      this.showing = false;
    }
  }
  async shot(video) {
    const canvas = new OffscreenCanvas(Math.min(WIDTH, video.videoWidth), 0);
    canvas.height = Math.round((canvas.width * video.videoHeight) / video.videoWidth);
    canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
    const blob = await canvas.convertToBlob({ type: "image/jpeg", quality: QUALITY });
    this.send({
      type: "video.frame",
      frame_id: String(this.shown++),
      pts_ms: Math.round(performance.now() - this.began),
      data: toBase64(await blob.arrayBuffer()),
    });
  }
  ask() {
    const text = $("question").value.trim();
    if (!text || !this.socket) return;
    this.player.flush();
    this.line("me", "You", text);
    this.answer = null;
    this.send({ type: "video.query", text });
    $("question").value = "";
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
  on(event) {
    if (event.type === "video.frame.ack") {
      this.kept += event.accepted;
      this.paint();
    } else if (event.type === "response.start") this.answer = this.line("them", "Answer", "");
    // What is still under way of an answer that was interrupted is not for the question after it.
    else if (event.type.startsWith("response.") && !this.answer) return;
    else if (event.type === "response.text.delta") this.answer.textContent += event.delta;
    else if (event.type === "response.text.done") this.answer.textContent = event.text;
    else if (event.type === "response.audio.delta")
      this.player.play(
        "answer",
        fromPcm16(Uint8Array.from(atob(event.data), (c) => c.charCodeAt(0)).subarray(WAV_HEADER)),
      );
    else if (event.type === "error")
      this.page.fail("camera", new Error(event.detail ? `${event.message}: ${event.detail}` : event.message));
  }
}
