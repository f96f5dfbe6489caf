// @ts-check
// A transcription session of the microphone: its words as they become certain.

import { Meter, microphone, release } from "./audio.js";
import { ServerError } from "./errors.js";
import { Server, Teller } from "./server.js";
import { SocketTransport } from "./transports.js";

/**
 * @typedef {object} Options
 * @property {string} [language] for one "de"; without it the model tells
 * @property {string} [microphone] a device's id
 *
 * @typedef {object} Line
 * @property {string} id
 * @property {string} text empty in the end where nothing was understood
 * @property {boolean} final
 * @property {number | null} from ms of all sound that was sent
 * @property {number | null} to
 *
 * @typedef {object} CaptionsTell
 * @property {Line} line as it is now
 * @property {Error} error the session goes on
 * @property {string} end why it ended, "" where it was stopped
 */

/** @extends {Teller<CaptionsTell>} */
export class Captions extends Teller {
  /** @param {Options & import("./server.js").ServerOptions} [options] */
  constructor(options = {}) {
    super();
    this.server = new Server(options);
    this.options = options;
    /** @type {SocketTransport | null} */
    this.transport = null;
    /** @type {Meter | null} */
    this.meter = null;
    /** @type {Map<string, Line>} */
    this.lines = new Map();
  }
  get open() {
    return this.transport !== null;
  }
  /** How loud the microphone is, 0 to 1. */
  get level() {
    return this.meter?.level ?? 0;
  }
  /** Ask for the microphone, and begin. Rejects where either is refused. */
  async start() {
    if (this.transport) throw new Error("these captions have begun already");
    this.lines.clear();
    const { language } = this.options;
    const stream = await microphone(this.options.microphone, false);
    try {
      this.meter = await Meter.of(stream);
      this.transport = await SocketTransport.open({
        server: this.server,
        path: "v1/realtime?intent=transcription",
        stream,
        onEvent: (event) => this.take(event),
        onClose: (reason) => this.end(reason),
      });
    } catch (error) {
      release(stream);
      this.meter?.close();
      throw error;
    }
    const transcription = { model: "default", ...(language ? { language } : {}) };
    this.transport.send({
      type: "session.update",
      session: { type: "transcription", audio: { input: { transcription } } },
    });
  }
  stop() {
    if (this.transport) this.end("");
  }
  /** @param {string} reason */
  end(reason) {
    this.transport?.close();
    this.transport = null;
    this.meter?.close();
    this.meter = null;
    this.tell("end", reason);
  }
  /**
   * @param {string} id
   * @param {Partial<Line>} change
   */
  change(id, change) {
    const line = this.lines.get(id) ?? { id, text: "", final: false, from: null, to: null };
    Object.assign(line, change);
    this.lines.set(id, line);
    this.tell("line", { ...line });
  }
  /** @param {import("./transports.js").Message} event */
  take(event) {
    const { item_id: id, type } = event;
    if (type === "input_audio_buffer.speech_started") this.change(id, { from: event.audio_start_ms });
    else if (type === "input_audio_buffer.speech_stopped") this.change(id, { to: event.audio_end_ms });
    else if (type.endsWith("input_audio_transcription.delta"))
      this.change(id, { text: (this.lines.get(id)?.text ?? "") + event.delta });
    else if (type.endsWith("input_audio_transcription.completed"))
      this.change(id, { text: event.transcript, final: true });
    else if (type === "error") this.tell("error", new ServerError(event.error.message, event.error.code));
  }
}
