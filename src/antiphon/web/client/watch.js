// @ts-check
// Questions about a camera or a shared screen: sends two frames a second; answers arrive as text and speech.

import { bytesOf, fromPcm16, Player, release, toBase64 } from "./audio.js";
import { device, ServerError } from "./errors.js";
import { Server, Teller } from "./server.js";

const LOST = "the connection was lost";
const EVERY_MS = 500,
  WIDTH = 960,
  QUALITY = 0.8,
  WAV_HEADER = 44;

/**
 * @typedef {object} WatchTells
 * @property {{text: string, final: boolean}} answer the whole text so far; a new answer begins with ""
 * @property {{shown: number, kept: number}} frames the number of frames sent, and of those that the server kept as new
 * @property {Error} error
 * @property {string} end
 */

/** @extends {Teller<WatchTells>} */
export class Watch extends Teller {
  /** @param {import("./server.js").ServerOptions} [options] */
  constructor(options = {}) {
    super();
    this.server = new Server(options);
    /** @type {WebSocket | null} */
    this.socket = null;
    /** @type {MediaStream | null} */
    this.stream = null;
    /** @type {Player | null} */
    this.player = null;
    /** @type {string | null} */
    this.answer = null;
    this.starts = this.shown = this.kept = this.began = this.timer = 0;
    this.showing = false;
    // A preview that a page may show; it works without being in the page.
    this.video = document.createElement("video");
    this.video.muted = this.video.playsInline = true;
  }
  get open() {
    return this.socket !== null;
  }
  /**
   * Ask for the camera or a screen, and begin. Ends the previous source. Rejects if the user or the server refuses.
   * @param {"camera" | "screen"} source
   */
  async start(source) {
    this.stop();
    // Aborts this start if another start or a stop came after it; the catch below releases its resources.
    const mine = this.starts;
    const still = () => {
      if (mine !== this.starts) throw new DOMException("This start was stopped.", "AbortError");
    };
    /** @type {MediaStream | null} */
    let stream = null;
    /** @type {WebSocket | null} */
    let socket = null;
    /** @type {Player | null} */
    let player = null;
    try {
      stream =
        source === "camera"
          ? await device("camera", (media) => media.getUserMedia({ video: { width: { ideal: 1280 } } }))
          : await device("screen", (media) => media.getDisplayMedia({ video: true }));
      still();
      player = await Player.open();
      socket = await this.server.open("v1/video/chat/stream", "it has no language model");
      const opened = socket;
      socket.onclose = ({ reason, wasClean }) => {
        if (this.socket === opened) this.stop(reason || (wasClean ? "the server has closed it" : LOST));
      };
      socket.onmessage = ({ data }) => {
        if (this.socket === opened) this.take(JSON.parse(data));
      };
      still();
      this.video.srcObject = stream;
      await this.video.play();
      still();
      if (socket.readyState !== WebSocket.OPEN) throw new Error(`It ended before it began: ${LOST}.`);
    } catch (error) {
      release(stream);
      socket?.close();
      player?.close();
      if (mine === this.starts) this.stop();
      throw error;
    }
    Object.assign(this, { stream, socket, player, answer: null });
    stream.getVideoTracks()[0].onended = () => {
      if (this.stream === stream) this.stop();
    };
    this.send({ type: "session.config", frame_filter: "blocks", max_frames: 120, max_memory_s: 600 });
    this.began = performance.now();
    this.shown = this.kept = 0;
    this.timer = window.setInterval(() => this.show(), EVERY_MS);
    this.show();
  }
  stop(reason = "") {
    this.starts += 1;
    window.clearInterval(this.timer);
    release(this.stream);
    const open = this.socket;
    this.socket = this.stream = null;
    open?.close();
    this.player?.close();
    this.player = null;
    this.video.srcObject = null;
    if (open) this.tell("end", reason);
  }
  /** @param {string} text */
  ask(text) {
    this.player?.flush();
    this.answer = null;
    this.send({ type: "video.query", text });
  }
  /** @param {object} event */
  send(event) {
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(event));
  }
  async show() {
    // If the server cannot keep up, skip frames instead of queueing them.
    if (!this.video.videoWidth || this.showing || (this.socket?.bufferedAmount ?? 0) > 1 << 20) return;
    this.showing = true;
    try {
      await this.shot(this.video);
    } catch (error) {
      this.tell("error", /** @type {Error} */ (error));
    } finally {
      this.showing = false;
    }
  }
  /** @param {HTMLVideoElement} video */
  async shot(video) {
    const canvas = new OffscreenCanvas(Math.min(WIDTH, video.videoWidth), 0);
    canvas.height = Math.round((canvas.width * video.videoHeight) / video.videoWidth);
    canvas.getContext("2d")?.drawImage(video, 0, 0, canvas.width, canvas.height);
    const blob = await canvas.convertToBlob({ type: "image/jpeg", quality: QUALITY });
    this.send({
      type: "video.frame",
      frame_id: String(this.shown++),
      pts_ms: Math.round(performance.now() - this.began),
      data: toBase64(await blob.arrayBuffer()),
    });
  }
  /** @param {import("./transports.js").Message} event */
  take(event) {
    if (event.type === "video.frame.ack") {
      this.kept += event.accepted ? 1 : 0;
      this.tell("frames", { shown: this.shown, kept: this.kept });
    } else if (event.type === "response.start") this.say("", false);
    // Drop the rest of an interrupted answer: it does not belong to the next question.
    else if (event.type.startsWith("response.") && this.answer === null) return;
    else if (event.type === "response.text.delta") this.say(this.answer + event.delta, false);
    else if (event.type === "response.text.done") this.say(event.text, true);
    else if (event.type === "response.audio.delta")
      this.player?.play("answer", fromPcm16(bytesOf(event.data).subarray(WAV_HEADER)));
    else if (event.type === "error") {
      const said = event.detail ? `${event.message}: ${event.detail}` : event.message;
      this.tell("error", new ServerError(said, event.code));
    }
  }
  /**
   * @param {string} text
   * @param {boolean} final
   */
  say(text, final) {
    this.answer = text;
    this.tell("answer", { text, final });
  }
}
