// @ts-check
// A live transcription of the microphone. When one session of the server ends, another one continues it.

import { capture, Meter, microphone, release, toBase64 } from "./audio.js";
import { ServerError } from "./errors.js";
import { KeptSound } from "./kept_sound.js";
import { Server, Teller } from "./server.js";
import { SocketTransport } from "./transports.js";

/**
 * @typedef {object} Options
 * @property {string} [language] such as "de"; without it, the model detects the language
 * @property {string} [microphone] a device's id
 * @property {boolean} [speakers] whether lines have the label of their voice; the server needs a speaker model
 *
 * @typedef {object} Line
 * @property {string} id
 * @property {string} text "" if, in the end, nothing was understood
 * @property {boolean} final
 * @property {number | null} from ms of audio since the start
 * @property {number | null} to
 * @property {string} speaker the label of the voice: A, B, …; "" if it is unknown
 *
 * @typedef {object} CaptionsTell
 * @property {Line} line the line's current state
 * @property {{state: "listening" | "waiting" | "stopping", reason: string}} state `waiting`: the session ended for this
 *   reason, and another one is being opened; the microphone stays on
 * @property {import("./kept_sound.js").Span} lost audio that was not transcribed: the server was away for longer than a
 *   minute, or too slow
 * @property {Error} error the captions continue
 * @property {string} end the reason of the end, "" after a stop
 *
 * @typedef {object} Run the state from a start to its end
 * @property {KeptSound} sound
 * @property {SocketTransport | null} transport null while there is no session
 * @property {Meter | null} meter
 * @property {() => void} hush stops the microphone
 * @property {number} base where the session's audio begins, in ms of all audio
 * @property {string | undefined} language the language that the server has accepted
 * @property {number} failures the number of sessions in a row that ended without a line
 * @property {Set<string>} due items whose final line has not arrived
 * @property {boolean} heard whether the server has processed all audio
 * @property {() => void} finished
 * @property {Promise<void> | null} stopping
 * @property {boolean} over
 * @property {Map<string, string>} speakers for each label of the session, the label here
 * @property {number} numSpeakers the number of labels here, of all sessions
 * @property {{bytes: number, at: number}} moved the bytes that had left the browser, and when they last increased
 */

// Timeouts of the last line after a stop, and of connecting.
const LAST_MS = 2000,
  CONNECT_MS = 10000;
// A socket that sends nothing for this time counts as broken, even if neither side has closed it.
const STALLED_MS = 15000;
// Backoff before another session: the first wait, which doubles, and the longest.
const FIRST_WAIT_MS = 250,
  MOST_WAIT_MS = 5000;
// The event id of a message that changes the language.
const CONFIGURE = "configure";
// Errors that end a session of the server, but not the captions.
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
  /** Whether the captions are running, even while the server is away. */
  get open() {
    return this.run !== null;
  }
  /** The volume of the microphone, 0 to 1. */
  get level() {
    return this.run?.meter?.level ?? 0;
  }
  /** Ask for the microphone, and begin. Rejects if the user or the server refuses. */
  async start() {
    if (this.run) throw new Error("These captions have begun already.");
    const mine = ++this.starts;
    // Aborts this start if another start or a stop came after it; the catch below releases its resources.
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
      speakers: new Map(),
      numSpeakers: 0,
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
   * Change the language while running. If the server refuses, an `error` event follows, and the language stays.
   * @param {{language: string}} options "": the model detects the language
   */
  configure({ language }) {
    this.options.language = language;
    this.run?.transport?.send({ ...this.update(), event_id: CONFIGURE });
  }
  /**
   * Stop the microphone, wait for the last line, at most 2 s, and end. Captions that are still starting end at once.
   * Resolves after the end.
   */
  stop() {
    this.starts += 1;
    return this.run ? this.finish(this.run, "") : Promise.resolve();
  }

  // --- the sessions of the server ------------------------------------------------------------------------------------

  update() {
    const { language, speakers } = this.options;
    const labels = speakers ? { speaker_labels: true } : {};
    const transcription = { model: "default", language: language || null, ...labels };
    return { type: "session.update", session: { type: "transcription", audio: { input: { transcription } } } };
  }
  /**
   * Open a session, and send it the audio that has no final line yet. Rejects if the server refuses.
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
    // Lines under way are transcribed again if their audio is kept; otherwise they stay as they are.
    for (const { id, from } of this.unfinished())
      this.change(run, id, from !== null && from >= sound.from ? { text: "", final: true } : { final: true });
    if (sound.lost) this.tell("lost", sound.lost);
    sound.lost = null;
    run.base = sound.from;
    run.due.clear();
    // The next session knows no voices, and begins its labels with A again.
    run.speakers = new Map();
    run.moved = { bytes: 0, at: performance.now() };
    run.transport = transport;
    for (const { pcm } of sound.pieces) this.give(transport, pcm);
    sound.sent = sound.to;
    if (run === this.run) this.tell("state", { state: "listening", reason: "" });
  }
  /**
   * The session has ended: try to open another one until that succeeds.
   * @param {Run} run
   * @param {string} reason
   */
  async lost(run, reason) {
    run.transport?.close();
    run.transport = null;
    // A pending stop no longer waits for its last line.
    run.finished();
    // Sending the same backlog again would overflow the server's buffer again.
    if (reason === OVERFLOW) run.sound.giveUp();
    while (!run.over && !run.stopping && !run.transport) {
      this.tell("state", { state: "waiting", reason });
      // With jitter, so that clients do not return all at once.
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
    else if (now - run.moved.at > STALLED_MS) this.lost(run, "the connection is stalled");
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
      // The server answers this message when it has processed everything before it.
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
    const line = this.lines.get(id) ?? { id, text: "", final: false, from: null, to: null, speaker: "" };
    Object.assign(line, change);
    // If the client or the end of a session has ended the line, it has no end time of its own.
    if (line.final) line.to ??= run.sound.to;
    this.lines.set(id, line);
    this.tell("line", { ...line });
    // A final line does not change again.
    if (line.final) this.lines.delete(id);
    return line;
  }
  /**
   * Return the label here of a label of the session.
   * @param {Run} run
   * @param {string | undefined} given
   */
  speaker(run, given) {
    if (!given) return "";
    const label = run.speakers.get(given) ?? letters(run.numSpeakers++);
    run.speakers.set(given, label);
    return label;
  }
  /**
   * The server has transcribed a line to its end: its audio need not be sent again.
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
      this.settle(run, id, { text: event.transcript, speaker: this.speaker(run, event.speaker_label) });
    else if (type.endsWith("input_audio_transcription.failed")) {
      this.settle(run, id, {});
      this.tell("error", new ServerError(event.error?.message ?? "What was said was not understood."));
    } else if (type === "error") {
      const { code, message, event_id: about } = event.error;
      if (about === CONFIGURE) this.options.language = run.language;
      // A stop commits the buffer, which may be empty.
      const isOurs = ENDS_A_SESSION.includes(code) || (run.stopping && code === "input_audio_buffer_commit_empty");
      if (!isOurs) this.tell("error", new ServerError(message, code));
    }
  }
}

/**
 * The label of a number from 0: A, B, …, Z, AA, AB, …
 * @param {number} n
 * @returns {string}
 */
function letters(n) {
  return (n < 26 ? "" : letters(Math.floor(n / 26) - 1)) + String.fromCharCode(65 + (n % 26));
}

/** @param {number} ms */
function clock(ms) {
  const two = (/** @type {number} */ n) => String(Math.floor(n)).padStart(2, "0");
  const thousandths = String(Math.floor(ms) % 1000).padStart(3, "0");
  return `${two(ms / 3600000)}:${two((ms / 60000) % 60)}:${two((ms / 1000) % 60)},${thousandths}`;
}

/**
 * Format lines as SRT subtitles, with the labels of known voices. Leaves out lines without text or times.
 * @param {(Pick<Line, "text" | "from" | "to"> & Partial<Pick<Line, "speaker">>)[]} lines in the order of their times
 * @returns {string}
 */
export function srt(lines) {
  return lines
    .filter(({ text, from, to }) => text && from !== null && to !== null)
    .map(({ text, from, to, speaker }, k) => {
      const said = speaker ? `${speaker}: ${text}` : text;
      return `${k + 1}\n${clock(from ?? 0)} --> ${clock(to ?? 0)}\n${said}\n`;
    })
    .join("\n");
}
