// @ts-check
// One spoken conversation: what is asked of the server, what it says, and what of it was heard.

import { bytesOf, fromPcm16, Meter, microphone, Player, RATE, release, through } from "./audio.js";
import { ServerError } from "./errors.js";
import { Server, Teller } from "./server.js";
import { DuplexTransport, RtcTransport, SocketTransport } from "./transports.js";

/**
 * @typedef {object} Tool a function that the model may call
 * @property {string} description
 * @property {object} parameters JSON schema of the one argument of `run`
 * @property {(given: any) => any} run what it returns is told to the model; what it throws, too
 *
 * @typedef {object} Options
 * @property {string} [instructions]
 * @property {string} [voice] it cannot change any more once the session has spoken
 * @property {"pause" | "complete" | "manual"} [turns] a turn ends after half a second of silence, when what was said is
 *   complete, or by `endTurn()`
 * @property {"websocket" | "webrtc" | "duplex"} [transport] duplex: both may speak at once, and a cut connection is
 *   resumed
 * @property {string} [microphone] a device's id
 * @property {string} [loudspeaker] a device's id
 * @property {boolean} [headphones] the microphone does not hear the answer
 * @property {Record<string, Tool>} [tools] by name
 *
 * @typedef {object} Line what one side said
 * @property {string} id the item's
 * @property {"user" | "assistant" | "tool"} who
 * @property {string} text all of it, so far
 * @property {number} heard how many characters of it were heard; all of what is not an answer
 * @property {boolean} cut whether it was cut short: the server forgets what was not heard
 * @property {boolean} final
 *
 * @typedef {Line & {total_s: number, heard_s: number, kept: string | null, silenced: boolean}} Item `silenced`: it was
 *   cut here, and is neither played nor heard any more; `kept`: what the server remembers of it
 *
 * @typedef {"ended" | "transcript" | "words" | "sound" | "heard"} Stage the turn's end is noticed, its transcript is
 *   there, the first words of the answer, its first sound, and when that was played
 *
 * @typedef {object} ConversationTells
 * @property {{state: "listening" | "thinking" | "speaking" | "ended", reason: string}} state
 * @property {Line} words
 * @property {{turn: number, stage: Stage, ms: number}} stage ms since the user's last sound, or since what was written
 * @property {{lane: "user" | "thinking" | "assistant", begins: boolean, at: number}} span `at`: of performance.now()
 * @property {{text: string, at: number}} mark something that happens at a moment, for one "interrupted"
 * @property {Error} error the session goes on
 * @property {import("./transports.js").Message} message whatever the server sends
 */

const DETECTION = {
  pause: { type: "server_vad", silence_duration_ms: 500 },
  complete: { type: "semantic_vad" },
  manual: null,
};
/** How long after the user's last sound the server notices the end, which is not in its times. */
const PAUSE_MS = { pause: 500, complete: 300, manual: 0 };
// Who calls tools for ever is told to answer.
const MAX_CALL_ROUNDS = 4;
// A race that users cannot see: the answer had ended already.
const HARMLESS = ["response_cancel_not_active", "playback_ack_too_late"];

/** @extends {Teller<ConversationTells>} */
export class Conversation extends Teller {
  /** @param {Options & import("./server.js").ServerOptions} [options] */
  constructor(options = {}) {
    super();
    this.server = new Server(options);
    /** @type {Options} */
    this.options = { ...options };
    this.starts = 0;
    /** @type {import("./transports.js").Transport | null} */
    this.transport = null;
    /** @type {Player | null} */
    this.player = null;
    /** @type {HTMLAudioElement | null} */
    this.element = null;
    /** @type {{microphone?: Meter, answer?: Meter}} */
    this.meters = {};
    /** @type {Map<string, Item>} */
    this.items = new Map();
    /** @type {Map<string, Promise<string>>} calls of tools that are under way, by their id */
    this.calls = new Map();
    /** @type {{number: number, ended: number, seen: Set<string>} | null} */
    this.turn = null;
    this.turns = this.rounds = this.acked_s = 0;
    /** @type {string | null} the item, or with WebRTC the response, that sounds */
    this.playing = null;
    /** @type {Map<string, boolean>} responses that are under way, and whether they were cut: their sound is dropped */
    this.responses = new Map();
    // Whether one was asked for that has not begun, and whether anything was spoken.
    this.asked = this.spoken = false;
    /** @type {(() => void)[]} who waits until there is none */
    this.idlers = [];
    /** @type {Set<string>} items whose sound has not begun to be played */
    this.waiting = new Set();
    /** @type {Set<string>} items of which more sound may come; some of it may have been played */
    this.unfinished = new Set();
    /** @type {number | null} */
    this.began = null;
  }

  get duplex() {
    return this.options.transport === "duplex";
  }

  /** Whether a session is open. */
  get open() {
    return this.transport !== null;
  }

  /** How loud both sides are now, 0 to 1. */
  get levels() {
    return { microphone: this.meters.microphone?.level ?? 0, answer: this.meters.answer?.level ?? 0 };
  }

  /** Ask for the microphone, and begin. Rejects where either is refused. */
  async start() {
    if (this.transport) throw new Error("This conversation has begun already.");
    const mine = ++this.starts;
    // A start that was overtaken by another, or by a stop, gives back what it was given.
    const still = () => {
      if (mine !== this.starts) throw new DOMException("The conversation was stopped.", "AbortError");
    };
    this.items.clear();
    this.calls.clear();
    this.waiting.clear();
    this.unfinished.clear();
    this.responses.clear();
    this.turn = this.playing = this.began = null;
    this.turns = this.rounds = this.acked_s = 0;
    this.asked = this.spoken = false;
    const { options, server } = this;
    /** @type {MediaStream | null} */
    let stream = null;
    /** @type {Player | null} */
    let player = null;
    /** @type {import("./transports.js").Transport | null} */
    let transport = null;
    try {
      stream = await microphone(options.microphone, !options.headphones);
      still();
      stream.getAudioTracks()[0].onended = () => {
        if (mine === this.starts) this.end("the microphone was disconnected");
      };
      const common = {
        server,
        stream,
        onEvent: (/** @type {import("./transports.js").Message} */ event) => {
          if (mine === this.starts) this.take(event);
        },
        onClose: (/** @type {string} */ reason) => {
          if (mine === this.starts) this.end(reason);
        },
      };
      const meter = await Meter.of(stream);
      still();
      this.meters.microphone = meter;
      if (options.transport === "webrtc") {
        transport = await RtcTransport.open({ ...common, onTrack: (sound) => this.listen(sound) });
      } else {
        player = await Player.open((playing) => this.played(playing));
        still();
        this.player = player;
        this.meters.answer = player.meter;
        if (options.loudspeaker !== undefined) await through(options.loudspeaker);
        transport = this.duplex
          ? await DuplexTransport.open({ ...common, session: this.session() })
          : await SocketTransport.open({ ...common, path: "v1/realtime" });
      }
      still();
    } catch (error) {
      release(stream);
      transport?.close();
      player?.close();
      if (mine === this.starts) this.end("", false);
      throw error;
    }
    this.transport = transport;
    this.began = performance.now();
    if (!this.duplex) this.send("session.update", { session: this.session() });
    this.state("listening");
  }

  /** End the session, also one that is just beginning. */
  stop() {
    this.end("");
  }

  /**
   * @param {string} reason
   * @param {boolean} [tells]
   */
  end(reason, tells = true) {
    const { transport } = this;
    this.starts += 1;
    this.transport = null;
    transport?.close();
    for (const meter of Object.values(this.meters)) meter?.close();
    this.meters = {};
    this.player?.close();
    this.player = null;
    if (this.element) this.element.srcObject = null;
    this.element = null;
    this.wake();
    if (tells && transport) this.state("ended", reason);
  }

  /**
   * Change instructions, turns, tools, or the voice while nothing was spoken.
   * @param {Options} options
   */
  configure(options) {
    Object.assign(this.options, options);
    if (options.loudspeaker !== undefined) through(options.loudspeaker, this.element).catch((e) => this.fail(e));
    this.send("session.update", { session: this.session() });
  }

  /**
   * Write instead of speaking. As with speaking, it cuts the answer short that is under way.
   * @param {string} text
   */
  async write(text) {
    if (!(await this.takeFloor())) return;
    const item = { type: "message", role: "user", content: [{ type: "input_text", text }] };
    this.send("conversation.item.create", { item });
    this.respond();
  }

  /** Cut what is said short, and begin a turn; false where the session has ended meanwhile. */
  async takeFloor() {
    if (!this.transport) throw new Error("No conversation is open: start it first.");
    const mine = this.starts;
    if (this.responses.size || this.playing || this.waiting.size) this.interrupt();
    await this.idle();
    if (mine !== this.starts) return false;
    this.begin(performance.now());
    return true;
  }

  /** The user's turn is over; where `turns` is "manual". */
  async endTurn() {
    if (!(await this.takeFloor())) return;
    this.send("input_audio_buffer.commit");
    this.respond();
  }

  /** Cut the answer short. */
  interrupt() {
    this.send("response.cancel");
    if (this.options.transport === "webrtc") this.send("output_audio_buffer.clear");
    this.silence();
  }

  /** Resolves once no response is under way; a server makes one at a time. */
  async idle() {
    while (this.transport && (this.responses.size || this.asked)) {
      /** @type {Promise<void>} */
      const changed = new Promise((resolve) => this.idlers.push(resolve));
      await changed;
    }
  }

  /** Somebody may go on who waited for `idle`. */
  wake() {
    for (const resolve of this.idlers.splice(0)) resolve();
  }

  respond(fields = {}) {
    this.asked = true;
    this.send("response.create", fields);
  }

  /**
   * Send an event of the protocol.
   * @param {string} type
   * @param {object} [fields]
   */
  send(type, fields = {}) {
    this.transport?.send({ type, ...fields });
  }

  session() {
    const { instructions, voice, turns = "pause", tools } = this.options;
    const voiced = voice && !this.spoken ? { voice } : {};
    const common = {
      ...(instructions === undefined ? {} : { instructions }),
      ...(tools
        ? {
            tools: Object.entries(tools).map(([name, { description, parameters }]) => ({
              type: "function",
              name,
              description,
              parameters,
            })),
          }
        : {}),
    };
    if (this.duplex)
      return {
        ...common,
        ...voiced,
        sample_rate_hz: RATE,
        turn_detection: DETECTION[turns],
        extra_body: { auto_response: turns !== "manual" },
      };
    return {
      type: "realtime",
      ...common,
      audio: {
        input: { transcription: { model: "default" }, turn_detection: DETECTION[turns] },
        output: { ducking: true, ...voiced },
      },
    };
  }

  // --- what the server says ------------------------------------------------------------------------------------------

  /** @param {import("./transports.js").Message} event */
  take(event) {
    const now = performance.now();
    this.tell("message", event);
    switch (event.type) {
      case "input_audio_buffer.speech_started":
        this.span("user", true, this.at(event.audio_start_ms, now));
        if (!this.duplex) this.silence();
        this.item(event.item_id, "user");
        break;
      case "input_audio_buffer.speech_stopped": {
        const ended = this.at(event.audio_end_ms - PAUSE_MS[this.options.turns ?? "pause"], now);
        this.span("user", false, ended);
        this.begin(ended);
        this.stage("ended", now);
        break;
      }
      case "conversation.item.added":
        if (event.item.type === "message" && event.item.role === "user") {
          const text = written(event.item);
          if (text) this.words(event.item.id, "user", text, { whole: true, final: true });
        } else if (event.item.type === "function_call")
          this.words(event.item.id, "tool", event.item.name, { whole: true });
        break;
      case "conversation.item.input_audio_transcription.delta":
        this.words(event.item_id, "user", event.delta);
        break;
      case "conversation.item.input_audio_transcription.completed":
        this.words(event.item_id, "user", event.transcript, { whole: true, final: true });
        this.stage("transcript", now);
        break;
      case "conversation.item.input_audio_transcription.failed":
        this.words(event.item_id, "user", "", { final: true });
        this.fail(new ServerError(event.error?.message ?? "What was said was not understood.", event.error?.code));
        break;
      case "response.created":
        this.asked = false;
        this.responses.set(event.response.id, false);
        this.span("thinking", true, now);
        this.state("thinking");
        break;
      case "response.output_audio_transcript.delta":
      case "response.output_text.delta":
        this.words(event.item_id, "assistant", event.delta);
        this.stage("words", now);
        break;
      case "response.output_audio.delta": {
        const pcm = fromPcm16(bytesOf(event.delta)),
          item = this.items.get(event.item_id);
        this.spoken = true;
        if (item) item.total_s += pcm.length / RATE;
        // What was under way when it was cut is not played any more.
        if (item?.silenced || this.responses.get(event.response_id)) break;
        this.stage("sound", now);
        this.span("thinking", false, now);
        if (this.player) {
          if (this.playing !== event.item_id) this.waiting.add(event.item_id);
          this.unfinished.add(event.item_id);
          this.player.play(event.item_id, pcm);
        }
        break;
      }
      case "output_audio_buffer.started":
        this.spoken = true;
        this.stage("sound", now);
        this.sounds(event.response_id, now);
        break;
      case "output_audio_buffer.stopped":
      case "output_audio_buffer.cleared":
        this.playing = null;
        this.span("assistant", false, now);
        this.state("listening");
        if (event.type.endsWith("cleared")) this.mark("interrupted", now);
        break;
      case "response.function_call_arguments.done":
        if (this.options.tools?.[event.name]) {
          this.words(event.item_id, "tool", `${event.name}(${event.arguments})`, { whole: true });
          this.calls.set(event.call_id, this.call(event.name, event.arguments, event.item_id));
        }
        break;
      case "response.done":
        this.done(event.response, now);
        break;
      case "output_audio_buffer.ducked":
      case "output_audio_buffer.unducked":
        this.duck(event.type.endsWith(".ducked"), now);
        break;
      case "turn.event":
        // Somebody speaks over the answer: the voice waits until it is known what for.
        if (event.event === "duck" || event.event === "unduck") this.duck(event.event === "duck", now);
        break;
      case "overlap.decision":
        if (event.action === "barge_in") this.silence();
        else this.mark(event.reason, now);
        break;
      case "session.resumed":
        this.mark("resumed", now);
        break;
      case "conversation.item.truncated":
        this.send("conversation.item.retrieve", { item_id: event.item_id });
        break;
      case "conversation.item.retrieved": {
        // What the server remembers of a cut answer is what it takes to have been heard.
        const item = this.items.get(event.item.id);
        if (item) {
          item.kept = written(event.item);
          this.show(item);
        }
        break;
      }
      case "error":
        this.asked = false;
        this.wake();
        if (!HARMLESS.includes(event.error.code)) this.fail(new ServerError(event.error.message, event.error.code));
        break;
    }
  }

  /**
   * @param {any} response
   * @param {number} now
   */
  done(response, now) {
    this.span("thinking", false, now);
    const { status, status_details: why } = response;
    this.responses.delete(response.id);
    this.wake();
    if (status === "failed") {
      const code = why?.error?.code ?? "";
      this.fail(new ServerError(`The answer failed: ${code || "the server does not say why"}. Ask again.`, code));
    }
    for (const { id } of response.output) {
      this.unfinished.delete(id);
      const item = this.items.get(id);
      if (!item) continue;
      item.final = true;
      this.show(item);
    }
    // Short answers are whole before their first sound is played.
    if (!this.playing && !this.waiting.size) this.state("listening");
    if (this.calls.size) this.answerCalls(status === "completed");
  }

  /**
   * The page's clock at a time of the session's sound.
   * @param {number} session_ms
   * @param {number} now
   */
  at(session_ms, now) {
    return this.began === null ? now : Math.min(now, this.began + session_ms);
  }

  // --- tools ---------------------------------------------------------------------------------------------------------

  /**
   * What a tool gives, as the model is told it.
   * @param {string} name
   * @param {string} given
   * @param {string} item
   */
  async call(name, given, item) {
    const mine = this.starts;
    let output;
    try {
      const result = await this.options.tools?.[name].run(JSON.parse(given || "{}"));
      output = typeof result === "string" ? result : JSON.stringify(result ?? null);
    } catch (error) {
      // A tool is the user's: whatever it throws is for the model, which can say so.
      console.warn(`the tool ${name} failed`, error);
      output = JSON.stringify({ error: String(error) });
    }
    if (mine === this.starts) this.words(item, "tool", ` → ${output}`, { final: true });
    return output;
  }

  /** @param {boolean} goesOn whether the user has left the floor to the answer */
  async answerCalls(goesOn) {
    const mine = this.starts,
      calls = [...this.calls];
    this.calls.clear();
    for (const [call_id, result] of calls) {
      const output = await result;
      // The session may be another one by now.
      if (mine !== this.starts) return;
      this.send("conversation.item.create", { item: { type: "function_call_output", call_id, output } });
    }
    // Somebody may have spoken meanwhile, and be answered.
    if (goesOn) await this.idle();
    if (!goesOn || mine !== this.starts) return;
    this.rounds += 1;
    this.respond(this.rounds >= MAX_CALL_ROUNDS ? { response: { tool_choice: "none" } } : {});
  }

  // --- hearing -------------------------------------------------------------------------------------------------------

  /** @param {MediaStream} sound */
  async listen(sound) {
    const mine = this.starts;
    const element = (this.element = new Audio());
    element.autoplay = true;
    element.srcObject = sound;
    try {
      if (this.options.loudspeaker !== undefined) await through(this.options.loudspeaker, element);
      await element.play();
      const meter = await Meter.of(sound);
      if (mine === this.starts) this.meters.answer = meter;
      else meter.close();
    } catch (error) {
      this.fail(error);
    }
  }

  /**
   * @param {string} id
   * @param {number} now
   */
  sounds(id, now) {
    if (!this.playing) {
      this.span("thinking", false, now);
      this.span("assistant", true, now);
      this.stage("heard", now);
      this.playing = id;
      this.state("speaking");
    }
    this.playing = id;
  }

  /** @param {import("./audio.js").Playing} playing */
  played({ sounding, item: id, heard }) {
    const now = performance.now();
    if (sounding && id) {
      const item = this.items.get(id);
      if (item?.silenced) return;
      if (this.playing && this.playing !== id) this.wholly(this.playing);
      this.waiting.delete(id);
      this.sounds(id, now);
      if (this.duplex) this.acknowledge(id, heard);
      if (!item) return;
      item.heard_s = heard;
      this.show(item);
    } else if (this.playing) {
      const item = this.items.get(this.playing);
      // More of it may come.
      if (!item || item.final) this.wholly(this.playing);
      this.playing = null;
      this.span("assistant", false, now);
      this.state(this.responses.size ? "thinking" : "listening");
    }
  }

  /**
   * An item was played to its end.
   * @param {string} id
   */
  wholly(id) {
    const item = this.items.get(id);
    if (!item) return;
    item.heard_s = item.total_s;
    if (this.duplex) this.acknowledge(id, item.total_s, true);
    this.show(item);
  }

  /** The user speaks, or asks for silence: stop what sounds, and tell the server how much of it was heard. */
  async silence() {
    const { player } = this;
    // WebRTC's sound is the server's to stop.
    if (!player) return;
    const sounding = this.playing,
      cut = new Set([...(sounding ? [sounding] : []), ...this.waiting, ...this.unfinished]);
    for (const id of this.responses.keys()) this.responses.set(id, true);
    for (const id of cut) {
      const item = this.items.get(id);
      if (item) item.silenced = true;
    }
    this.waiting.clear();
    this.unfinished.clear();
    this.playing = null;
    const flushed = player.flush();
    if (!cut.size) return;
    const now = performance.now();
    if (sounding) this.span("assistant", false, now);
    this.mark("interrupted", now);
    if (!this.responses.size) this.state("listening");
    const heard = await flushed;
    if (player !== this.player) return;
    for (const id of cut) {
      // Of what has not begun to sound, nothing was heard.
      const heard_s = (heard[id] ?? 0) / RATE;
      const item = this.items.get(id);
      if (item) item.heard_s = heard_s;
      if (this.duplex) this.acknowledge(id, heard_s, true);
      else
        this.send("conversation.item.truncate", {
          item_id: id,
          content_index: 0,
          audio_end_ms: Math.round(1000 * heard_s),
        });
    }
  }

  /**
   * @param {boolean} held
   * @param {number} now
   */
  duck(held, now) {
    this.player?.hold(held);
    this.mark(held ? "duck" : "unduck", now);
  }

  /**
   * By the audio clock: so much of it was heard. Five times a second is often enough.
   * @param {string} item_id
   * @param {number} heard_s
   */
  acknowledge(item_id, heard_s, now = false) {
    if (!now && heard_s - this.acked_s < 0.2 && heard_s >= this.acked_s) return;
    this.acked_s = heard_s;
    this.send("playback.ack", { item_id, played_ms: Math.round(heard_s * 1000) });
  }

  // --- what is told --------------------------------------------------------------------------------------------------

  /**
   * @param {string} id
   * @param {Line["who"]} who
   */
  item(id, who) {
    let item = this.items.get(id);
    if (!item) {
      const line = { id, who, text: "", heard: 0, cut: false, final: false };
      item = { ...line, total_s: 0, heard_s: 0, kept: null, silenced: false };
      this.items.set(id, item);
      this.show(item);
    }
    return item;
  }

  /**
   * @param {string} id
   * @param {Line["who"]} who
   * @param {string} text
   */
  words(id, who, text, { whole = false, final = false } = {}) {
    const item = this.item(id, who);
    item.text = whole ? text : item.text + text;
    item.final ||= final;
    this.show(item);
  }

  /** @param {Item} item */
  show(item) {
    const { id, who, text, final, kept, total_s, heard_s } = item;
    let heard = text.length;
    if (kept !== null) heard = Math.min(heard, kept.length);
    else if (who === "assistant" && this.player && (total_s || !final)) {
      // More sound comes after its words, and the other way round: what was heard stays so.
      item.heard = Math.max(item.heard, total_s ? Math.round(heard * Math.min(1, heard_s / total_s)) : 0);
      heard = item.heard;
    }
    this.tell("words", { id, who, text, heard, cut: kept !== null, final });
  }

  /** @param {number} ended */
  begin(ended) {
    this.turn = { number: ++this.turns, ended, seen: new Set() };
    this.rounds = 0;
  }

  /**
   * @param {Stage} stage
   * @param {number} now
   */
  stage(stage, now) {
    if (!this.turn || this.turn.seen.has(stage)) return;
    this.turn.seen.add(stage);
    this.tell("stage", { turn: this.turn.number, stage, ms: now - this.turn.ended });
  }

  /**
   * @param {ConversationTells["span"]["lane"]} lane
   * @param {boolean} begins
   * @param {number} at
   */
  span(lane, begins, at) {
    this.tell("span", { lane, begins, at });
  }

  /**
   * @param {string} text
   * @param {number} at
   */
  mark(text, at) {
    this.tell("mark", { text, at });
  }

  /** @param {ConversationTells["state"]["state"]} state */
  state(state, reason = "") {
    this.tell("state", { state, reason });
  }

  /** @param {unknown} error */
  fail(error) {
    this.tell("error", error instanceof Error ? error : new Error(String(error)));
  }
}

/** @param {any} item */
function written(item) {
  return item.content.map((/** @type {any} */ c) => c.transcript || c.text || "").join(" ");
}
