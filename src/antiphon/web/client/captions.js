// @ts-check
// A transcription of the microphone: its words as they become certain, over as many sessions of the server as it takes.

import { capture, Meter, microphone, release, toBase64 } from "./audio.js";
import { ServerError } from "./errors.js";
import { KeptSound } from "./kept_sound.js";
import { Server, Teller } from "./server.js";
import { SocketTransport } from "./transports.js";

/**
 * @typedef {object} Options
 * @property {string} [language] for one "de"; without it the model detects it
 * @property {string} [microphone] a device's id
 *
 * @typedef {object} Line
 * @property {string} id
 * @property {string} text empty in the end where nothing was understood
 * @property {boolean} final
 * @property {number | null} from ms of all sound since the start
 * @property {number | null} to
 *
 * @typedef {object} CaptionsTell
 * @property {Line} line as it is now
 * @property {{state: "listening" | "waiting" | "stopping", reason: string}} state `waiting`: the session has ended, for
 *   this reason, and another one is asked for; the microphone is still heard
 * @property {import("./kept_sound.js").Span} lost sound that was not transcribed: the server was away for longer than a
 *   minute, or too slow
 * @property {Error} error the captions go on
 * @property {string} end why they ended, "" where they were stopped
 *
 * @typedef {object} Run from a start to its end
 * @property {KeptSound} sound
 * @property {SocketTransport | null} transport null while there is no session
 * @property {Meter | null} meter
 * @property {() => void} hush ends the microphone
 * @property {number} base where the session's sound begins in all sound, in ms
 * @property {string | undefined} language that the server has taken
 * @property {number} failures how many sessions in a row ended without a line
 * @property {Set<string>} due items whose final line is still to come
 * @property {boolean} heard whether the server has taken all sound
 * @property {() => void} finished
 * @property {Promise<void> | null} stopping
 * @property {boolean} over
 * @property {{bytes: number, at: number}} moved how much had left the browser when more last did
 */

// How long a stop waits for the last line, and an attempt to connect for the server.
const LAST_MS = 2000,
  CONNECT_MS = 10000;
// A socket that takes nothing for this long is broken, though no one has closed it.
const STALLED_MS = 15000;
// The wait before another session, which doubles.
const FIRST_WAIT_MS = 250,
  MOST_WAIT_MS = 5000;
// The id of a message that changes the language in mid-call.
const CONFIGURE = "configure";
// Errors that end a session of the server, not the captions.
const OVERFLOW = "input_audio_buffer_overflow",
  ENDS_A_SESSION = ["session_expired", "server_shutting_down", "rate_limit_exceeded", OVERFLOW];

/** @param {number} ms */
const after = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** @extends {Teller<CaptionsTell>} */
export class Captions extends Teller {
  /** @param {Options & import("./server.js").ServerOptions} [options] */
  constructor(options = {}) {
    super();
    this.server = new Server(options);
    this.options = { ...options };
    /** @type {Run | null} */
    this.run = null;
    this.starts = 0;
    /** @type {Map<string, Line>} */
    this.lines = new Map();
  }
  /** Whether they have begun and not ended, also while the server is away. */
  get open() {
    return this.run !== null;
  }
  /** How loud the microphone is, 0 to 1. */
  get level() {
    return this.run?.meter?.level ?? 0;
  }
  /** Ask for the microphone, and begin. Rejects where either is refused. */
  async start() {
    if (this.run) throw new Error("These captions have begun already.");
    const mine = ++this.starts;
    // A start that was overtaken by another, or by a stop, gives back what it was given.
    const still = () => {
      if (mine !== this.starts) throw new DOMException("The captions were stopped.", "AbortError");
    };
    /** @type {Run} */
    const run = {
      sound: new KeptSound(),
      transport: null,
      meter: null,
      hush: () => {},
      base: 0,
      language: undefined,
      failures: 0,
      due: new Set(),
      heard: false,
      finished: () => {},
      stopping: null,
      over: false,
      moved: { bytes: 0, at: 0 },
    };
    /** @type {MediaStream | null} */
    let stream = null;
    try {
      stream = await microphone(this.options.microphone, false);
      still();
      run.meter = await Meter.of(stream);
      still();
      this.lines.clear();
      await this.connect(run);
      still();
      run.hush = await capture(stream, (pcm) => this.hear(run, pcm));
      still();
    } catch (error) {
      this.leave(run);
      release(stream);
      throw error;
    }
    stream.getAudioTracks()[0].onended = () => this.finish(run, "the microphone was disconnected");
    this.run = run;
    if (run.transport) this.tell("state", { state: "listening", reason: "" });
  }
  /**
   * Change the language in mid-call. Where the server refuses it, that is an `error`, and the one before stays.
   * @param {{language: string}} options "" has the model detect it
   */
  configure({ language }) {
    this.options.language = language;
    this.run?.transport?.send({ ...this.update(), event_id: CONFIGURE });
  }
  /**
   * End the microphone, wait for the last line, 2 s at most, and end; what is just beginning ends at once. Resolves
   * when it has ended.
   */
  stop() {
    this.starts += 1;
    return this.run ? this.finish(this.run, "") : Promise.resolve();
  }

  // --- the sessions of the server ------------------------------------------------------------------------------------

  update() {
    const { language } = this.options;
    const transcription = { model: "default", language: language || null };
    return { type: "session.update", session: { type: "transcription", audio: { input: { transcription } } } };
  }
  /**
   * Open a session, and give it the sound that has no final line yet. Rejects where the server refuses.
   * @param {Run} run
   */
  async connect(run) {
    /** @type {SocketTransport | null} */
    let transport = null;
    let taken = () => {};
    /** @type {(error: Error) => void} */
    let refuse = () => {};
    /** @type {Promise<void>} */
    const answer = new Promise((resolve, reject) => ([taken, refuse] = [resolve, reject]));
    answer.catch(() => {});
    const mine = () => transport !== null && transport === run.transport;
    const opening = SocketTransport.open({
      server: this.server,
      path: "v1/realtime?intent=transcription",
      stream: null,
      onEvent: (event) => {
        if (mine()) this.take(run, event);
        else if (event.type === "session.updated") {
          this.take(run, event);
          taken();
        }
        else if (event.type === "error") {
          const { message, code, type } = event.error;
          refuse(new ServerError(message, code, type === "invalid_request_error" && !ENDS_A_SESSION.includes(code)));
        }
      },
      onClose: (reason) => (mine() ? this.lost(run, reason) : refuse(new Error(reason))),
    });
    try {
      transport = await Promise.race([opening, after(CONNECT_MS).then(() => Promise.reject(new Error("no answer")))]);
      transport.send(this.update());
      await Promise.race([answer, after(CONNECT_MS).then(() => Promise.reject(new Error("no answer")))]);
    } catch (error) {
      opening.then(
        (late) => late.close(),
        () => {},
      );
      throw error;
    }
    if (run.over || run.stopping) return transport.close();
    const { sound } = run;
    // What was begun is said again from the sound that is kept; what is not kept stays as it is.
    for (const { id, from } of this.unfinished())
      this.change(run, id, from !== null && from >= sound.from ? { text: "", final: true } : { final: true });
    if (sound.lost) this.tell("lost", sound.lost);
    sound.lost = null;
    run.base = sound.from;
    run.due.clear();
    run.moved = { bytes: 0, at: performance.now() };
    run.transport = transport;
    for (const { pcm } of sound.pieces) this.give(transport, pcm);
    sound.sent = sound.to;
    if (run === this.run) this.tell("state", { state: "listening", reason: "" });
  }
  /**
   * The session has ended: ask for another one until there is one.
   * @param {Run} run
   * @param {string} reason
   */
  async lost(run, reason) {
    run.transport?.close();
    run.transport = null;
    // A stop waits for its last line no longer.
    run.finished();
    // What is more than the server lets wait would be more than that again.
    if (reason === OVERFLOW) run.sound.giveUp();
    while (!run.over && !run.stopping && !run.transport) {
      this.tell("state", { state: "waiting", reason });
      // Not all at once, where many wait for one server.
      await after(Math.min(MOST_WAIT_MS, FIRST_WAIT_MS * 2 ** run.failures++) * (0.5 + Math.random() / 2));
      if (run.over || run.stopping) return;
      try {
        await this.connect(run);
      } catch (error) {
        reason = /** @type {Error} */ (error).message;
        if (error instanceof ServerError && error.lasting) return this.end(run, reason);
      }
    }
  }
  /**
   * @param {SocketTransport} transport
   * @param {ArrayBuffer} pcm
   */
  give(transport, pcm) {
    transport.send({ type: "input_audio_buffer.append", audio: toBase64(pcm) });
  }
  /**
   * @param {Run} run
   * @param {ArrayBuffer} pcm
   */
  hear(run, pcm) {
    const { transport, sound } = run;
    sound.add(pcm);
    if (!transport) return;
    this.give(transport, pcm);
    sound.sent = sound.to;
    const now = performance.now(),
      { delivered, waits } = transport;
    if (!waits || delivered !== run.moved.bytes) run.moved = { bytes: delivered, at: now };
    else if (now - run.moved.at > STALLED_MS) this.lost(run, "the server takes nothing any more");
  }

  // --- the end -------------------------------------------------------------------------------------------------------

  /**
   * @param {Run} run
   * @param {string} reason
   */
  finish(run, reason) {
    run.stopping ??= this.finishing(run, reason);
    return run.stopping;
  }
  /**
   * @param {Run} run
   * @param {string} reason
   */
  async finishing(run, reason) {
    run.hush();
    if (run.transport) {
      this.tell("state", { state: "stopping", reason });
      /** @type {Promise<void>} */
      const finished = new Promise((resolve) => (run.finished = resolve));
      run.transport.send({ type: "input_audio_buffer.commit" });
      // Answered when everything before it has been heard.
      run.transport.send({ type: "input_audio_buffer.clear" });
      await Promise.race([finished, after(LAST_MS)]);
    }
    this.end(run, reason);
  }
  /**
   * @param {Run} run
   * @param {string} reason
   */
  end(run, reason) {
    if (run.over) return;
    this.leave(run);
    this.run = null;
    for (const { id } of this.unfinished()) this.change(run, id, { final: true });
    this.lines.clear();
    run.sound.drop(run.sound.to);
    if (!run.transport && run.sound.lost) this.tell("lost", run.sound.lost);
    this.tell("end", reason);
  }
  /** @param {Run} run */
  leave(run) {
    run.over = true;
    run.hush();
    run.transport?.close();
    run.meter?.close();
  }

  // --- the lines -----------------------------------------------------------------------------------------------------

  unfinished() {
    return [...this.lines.values()].filter((line) => !line.final);
  }
  /**
   * @param {Run} run
   * @param {string} id
   * @param {Partial<Line>} change
   */
  change(run, id, change) {
    const line = this.lines.get(id) ?? { id, text: "", final: false, from: null, to: null };
    Object.assign(line, change);
    // A line that was ended by the client, or with its session, has no end of its own.
    if (line.final) line.to ??= run.sound.to;
    this.lines.set(id, line);
    this.tell("line", { ...line });
    // What is final does not change any more.
    if (line.final) this.lines.delete(id);
    return line;
  }
  /**
   * The server has heard a line to its end: its sound need not be sent again.
   * @param {Run} run
   * @param {string} id
   * @param {Partial<Line>} change
   */
  settle(run, id, change) {
    const { to } = this.change(run, id, { ...change, final: true });
    run.sound.settle(Math.min(to ?? 0, ...this.unfinished().map(({ from }) => from ?? 0)));
    run.failures = 0;
    run.due.delete(id);
    if (run.heard && !run.due.size) run.finished();
  }
  /**
   * @param {Run} run
   * @param {import("./transports.js").Message} event
   */
  take(run, event) {
    const { item_id: id, type } = event;
    if (type === "input_audio_buffer.speech_started") this.change(run, id, { from: run.base + event.audio_start_ms });
    else if (type === "input_audio_buffer.speech_stopped") this.change(run, id, { to: run.base + event.audio_end_ms });
    else if (type === "session.updated") run.language = event.session?.audio?.input?.transcription?.language ?? "";
    else if (type === "input_audio_buffer.committed") run.due.add(id);
    else if (type === "input_audio_buffer.cleared") {
      run.heard = true;
      if (!run.due.size) run.finished();
    } else if (type.endsWith("input_audio_transcription.delta"))
      this.change(run, id, { text: (this.lines.get(id)?.text ?? "") + event.delta });
    else if (type.endsWith("input_audio_transcription.completed"))
      this.settle(run, id, { text: event.transcript });
    else if (type.endsWith("input_audio_transcription.failed")) {
      this.settle(run, id, {});
      this.tell("error", new ServerError(event.error?.message ?? "What was said was not understood."));
    } else if (type === "error") {
      const { code, message, event_id: about } = event.error;
      if (about === CONFIGURE) this.options.language = run.language;
      // A stop commits what there is, and there may be nothing.
      const isOurs = ENDS_A_SESSION.includes(code) || (run.stopping && code === "input_audio_buffer_commit_empty");
      if (!isOurs) this.tell("error", new ServerError(message, code));
    }
  }
}
