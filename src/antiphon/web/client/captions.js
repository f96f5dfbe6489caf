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
    this.starts = 0;
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
    if (this.transport) throw new Error("These captions have begun already.");
    const mine = ++this.starts;
    // A start that was overtaken by another, or by a stop, gives back what it was given.
    const still = () => {
      if (mine !== this.starts) throw new DOMException("The captions were stopped.", "AbortError");
    };
    this.lines.clear();
    const { language } = this.options;
    /** @type {MediaStream | null} */
    let stream = null;
    /** @type {SocketTransport | null} */
    let transport = null;
    /** @type {Meter | null} */
    let meter = null;
    try {
      stream = await microphone(this.options.microphone, false);
      still();
      stream.getAudioTracks()[0].onended = () => {
        if (mine === this.starts) this.end("the microphone was disconnected");
      };
      meter = await Meter.of(stream);
      transport = await SocketTransport.open({
        server: this.server,
        path: "v1/realtime?intent=transcription",
        stream,
        onEvent: (event) => {
          if (mine === this.starts) this.take(event);
        },
        onClose: (reason) => {
          if (mine === this.starts) this.end(reason);
        },
      });
      still();
    } catch (error) {
      release(stream);
      transport?.close();
      meter?.close();
      throw error;
    }
    Object.assign(this, { transport, meter });
    const transcription = { model: "default", ...(language ? { language } : {}) };
    transport.send({
      type: "session.update",
      session: { type: "transcription", audio: { input: { transcription } } },
    });
  }
  /** End them, also those that are just beginning. */
  stop() {
    this.end("");
  }
  /** @param {string} reason */
  end(reason) {
    const { transport } = this;
    this.starts += 1;
    this.transport = null;
    transport?.close();
    this.meter?.close();
    this.meter = null;
    if (transport) this.tell("end", reason);
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
    // What is final does not change: all day long, only its place in time may still come.
    if (line.final && line.to !== null) this.lines.delete(id);
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
    else if (type.endsWith("input_audio_transcription.failed")) {
      this.change(id, { final: true });
      this.tell("error", new ServerError(event.error?.message ?? "What was said was not understood."));
    }
    else if (type === "error") this.tell("error", new ServerError(event.error.message, event.error.code));
  }
}
