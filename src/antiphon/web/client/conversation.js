// @ts-check
// One spoken conversation: sends the client's requests, handles the server's events, and tracks how much was heard.

import { bytesOf, fromPcm16, Meter, microphone, Player, RATE, release, through } from "./audio.js";
import { ServerError } from "./errors.js";
import { Server, Teller } from "./server.js";
import { DuplexTransport, RtcTransport, SocketTransport } from "./transports.js";

/**
 * @typedef {object} Tool a function that the model may call
 * @property {string} description
 * @property {object} parameters JSON schema of the one argument of `run`
 * @property {(given: any) => any} run the model gets what it returns or throws
 *
 * @typedef {object} Options
 * @property {string} [instructions]
 * @property {string} [voice] it cannot change after the session has spoken
 * @property {"pause" | "complete" | "manual"} [turns] a turn ends after half a second of silence, when the sentence is
 *   complete, or by `endTurn()`
 * @property {"websocket" | "webrtc" | "duplex"} [transport] duplex: both sides may speak at once, and a broken
 *   connection is resumed; webrtc: after a broken connection, another call begins with what was said
 * @property {string} [microphone] a device's id
 * @property {string} [loudspeaker] a device's id
 * @property {boolean} [headphones] whether the user wears headphones, so that the microphone does not hear the answer
 * @property {Record<string, Tool>} [tools] by name
 *
 * @typedef {object} Line the words of one side
 * @property {string} id the item's id
 * @property {"user" | "assistant" | "tool"} who
 * @property {string} text the whole text so far
 * @property {number} heard the number of its characters that were heard; all of them, unless it is an answer
 * @property {boolean} cut whether it was cut off: the server forgets the part that was not heard
 * @property {boolean} final
 *
 * @typedef {object} Heard
 * @property {number} total_s the seconds of its sound so far
 * @property {number} heard_s the seconds of it that were played
 * @property {string | null} kept the text that the server keeps of it, if it was cut off
 * @property {boolean} silenced whether the client cut it off, and no longer plays it
 * @property {Promise<object[]> | null} called of a tool: the protocol's items of its call and its output
 *
 * @typedef {Line & Heard} Item
 *
 * @typedef {"ended" | "transcript" | "words" | "sound" | "heard"} Stage the end of the turn is detected, its transcript
 *   is complete, the answer's first words arrive, its first audio arrives, and that audio is played
 *
 * @typedef {object} ConversationTells
 * @property {{state: "listening" | "thinking" | "speaking" | "ended", reason: string}} state
 * @property {Line} words
 * @property {{turn: number, stage: Stage, ms: number}} stage ms since the user's last sound, or since a written message
 * @property {{lane: "user" | "thinking" | "assistant", begins: boolean, at: number}} span `at`: a
 *   time of performance.now()
 * @property {{text: string, at: number}} mark an event at a point in time, such as "interrupted"
 * @property {Error} error the session continues
 * @property {import("./transports.js").Message} message every message of the server
 */

const DETECTION = {
  pause: { type: "server_vad", silence_duration_ms: 500 },
  complete: { type: "semantic_vad" },
  manual: null,
};
/** The delay between the user's last sound and the end of the turn that the server reports. */
const PAUSE_MS = { pause: 500, complete: 300, manual: 0 };
// After this number of rounds of tool calls the model has to answer. Otherwise it may call tools forever.
const MAX_CALL_ROUNDS = 4;
// The number of attempts to begin another call after a broken connection.
const RETRIES = 7;
// Errors that are not shown, because the answer had already ended when the request arrived.
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
    /** @type {MediaStream | null} the microphone */
    this.stream = null;
    /** @type {Player | null} */
    this.player = null;
    /** @type {HTMLAudioElement | null} */
    this.element = null;
    /** @type {{microphone?: Meter, answer?: Meter}} */
    this.meters = {};
    /** @type {Map<string, Item>} */
    this.items = new Map();
    /** @type {Map<string, object>} the protocol's items that were written and not confirmed by the server, by id */
    this.written = new Map();
    this.num_written = 0;
    /** @type {Map<string, Promise<string>>} running tool calls, by id */
    this.calls = new Map();
    /** @type {{number: number, ended: number, seen: Set<string>} | null} */
    this.turn = null;
    this.turns = this.rounds = this.acked_s = 0;
    /** @type {string | null} the item, or with WebRTC the response, that is playing */
    this.playing = null;
    /** @type {Map<string, boolean>} responses under way, and whether they were cut off: their audio is dropped then */
    this.responses = new Map();
    // Whether a response was requested that has not begun, and whether the session has spoken.
    this.asked = this.spoken = false;
    /** @type {(() => void)[]} callbacks that wait until no response is under way */
    this.idlers = [];
    /** @type {Set<string>} items whose audio has not begun to play */
    this.waiting = new Set();
    /** @type {Set<string>} items that may get more audio; a part of it may have been played */
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

  /** The current volume of both sides, 0 to 1. */
  get levels() {
    return { microphone: this.meters.microphone?.level ?? 0, answer: this.meters.answer?.level ?? 0 };
  }

  /** Ask for the microphone, and begin. Rejects if the user or the server refuses. */
  async start() {
    if (this.transport) throw new Error("This conversation has begun already.");
    const mine = ++this.starts;
    // Aborts this start if another start or a stop came after it; the catch below releases its resources.
    const still = () => {
      if (mine !== this.starts) throw new DOMException("The conversation was stopped.", "AbortError");
    };
    this.items.clear();
    this.written.clear();
    this.turns = 0;
    this.forget();
    const { options } = this;
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
      const common = this.common(stream, mine);
      const meter = await Meter.of(stream);
      still();
      this.meters.microphone = meter;
      if (options.transport === "webrtc") {
        transport = await this.dial(stream, mine);
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
    this.stream = stream;
    this.began = performance.now();
    if (!this.duplex) this.send("session.update", { session: this.session() });
    this.state("listening");
  }

  /** Forget the state of the last session, except for what was said. */
  forget() {
    this.calls.clear();
    this.waiting.clear();
    this.unfinished.clear();
    this.responses.clear();
    this.turn = this.playing = this.began = null;
    this.rounds = this.acked_s = 0;
    this.asked = this.spoken = false;
  }

  /**
   * @param {MediaStream} stream
   * @param {number} mine
   */
  common(stream, mine) {
    return {
      server: this.server,
      stream,
      onEvent: (/** @type {import("./transports.js").Message} */ event) => {
        if (mine === this.starts) this.take(event);
      },
      onClose: (/** @type {string} */ reason, /** @type {boolean} */ lost) => {
        if (mine !== this.starts) return;
        if (lost && this.options.transport === "webrtc") this.takeUp(reason);
        else this.end(reason);
      },
    };
  }

  /**
   * Begin a call. It ends with its own copy of the microphone's stream, so that another call can follow.
   * @param {MediaStream} stream
   * @param {number} mine
   */
  dial(stream, mine) {
    return RtcTransport.open({
      ...this.common(stream.clone(), mine),
      onTrack: (sound) => {
        if (mine === this.starts) this.listen(sound);
      },
    });
  }

  /**
   * Begin another call with what was said, because the server or the door of this one is gone. An answer that was under
   * way is asked for again.
   * @param {string} reason the reason of the end if no call begins
   */
  async takeUp(reason) {
    const mine = this.starts,
      { stream } = this,
      now = performance.now(),
      wasAsked = this.asked || this.responses.size > 0;
    this.transport?.close();
    this.span(this.playing ? "assistant" : "thinking", false, now);
    this.forget();
    // Whatever is written meanwhile waits.
    this.asked = true;
    this.mark("lost", now);
    const said = await this.said();
    for (let k = 0; stream && k < RETRIES; k++) {
      await new Promise((resolve) => setTimeout(resolve, 250 * 2 ** k));
      if (mine !== this.starts) return;
      try {
        const next = await this.dial(stream, mine);
        if (mine !== this.starts) return next.close();
        this.transport = next;
      } catch (error) {
        // Another door may not have taken over yet. A refusal stays one.
        if (error instanceof ServerError && error.lasting) break;
        continue;
      }
      this.began = performance.now();
      this.send("session.update", { session: this.session() });
      for (const item of said) this.send("conversation.item.create", { item });
      this.mark("resumed", this.began);
      this.state("listening");
      this.asked = false;
      if (wasAsked || (said.length && said.at(-1).role !== "assistant")) this.respond();
      else this.wake();
      return;
    }
    if (mine === this.starts) this.end(reason);
  }

  /**
   * The protocol's items with which another session knows what was said, without an answer that is not complete. What
   * was written before the end of the last session was noticed is among them.
   */
  async said() {
    /** @type {any[]} */
    const items = [];
    for (const { id, who, text, kept, final, called } of this.items.values()) {
      const type = who === "user" ? "input_text" : "output_text",
        content = [{ type, text: kept ?? text }];
      if (called) items.push(...(await called));
      else if (who !== "tool" && final && content[0].text) items.push({ id, type: "message", role: who, content });
    }
    return [...items, ...this.written.values()];
  }

  /** End the session, even while it is starting. */
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
    release(this.stream);
    this.stream = null;
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
   * Change the instructions, turns or tools, or the voice before the session has spoken.
   * @param {Options} options
   */
  configure(options) {
    Object.assign(this.options, options);
    if (options.loudspeaker !== undefined) through(options.loudspeaker, this.element).catch((e) => this.fail(e));
    this.send("session.update", { session: this.session() });
  }

  /**
   * Write instead of speaking. Like speech, it cuts off the answer that is under way.
   * @param {string} text
   */
  async write(text) {
    if (!(await this.takeFloor())) return;
    const id = `written_${++this.num_written}`,
      item = { id, type: "message", role: "user", content: [{ type: "input_text", text }] };
    this.written.set(id, item);
    this.send("conversation.item.create", { item });
    this.respond();
  }

  /** Cut off the answer, and begin a turn. Resolves to false if the session ended meanwhile. */
  async takeFloor() {
    if (!this.transport) throw new Error("No conversation is open: start it first.");
    const mine = this.starts;
    if (this.responses.size || this.playing || this.waiting.size) this.interrupt();
    await this.idle();
    if (mine !== this.starts) return false;
    this.begin(performance.now());
    return true;
  }

  /** End the user's turn, if `turns` is "manual". */
  async endTurn() {
    if (!(await this.takeFloor())) return;
    this.send("input_audio_buffer.commit");
    this.respond();
  }

  /** Cut off the answer. */
  interrupt() {
    this.send("response.cancel");
    if (this.options.transport === "webrtc") this.send("output_audio_buffer.clear");
    this.silence();
  }

  /** Resolves when no response is under way, because a server makes one response at a time. */
  async idle() {
    while (this.transport && (this.responses.size || this.asked)) {
      /** @type {Promise<void>} */
      const changed = new Promise((resolve) => this.idlers.push(resolve));
      await changed;
    }
  }

  /** Wake all callers that wait in `idle`. */
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

  // --- events of the server ------------------------------------------------------------------------------------------

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
        this.written.delete(event.item.id);
        if (event.item.type === "message" && event.item.role === "user") {
          const text = written(event.item);
          if (text) this.words(event.item.id, "user", text, { whole: true, final: true });
        } else if (event.item.type === "function_call" && !this.items.has(event.item.id))
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
        // Audio that was on its way when the answer was cut off is dropped.
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
          const { call_id, name, arguments: given } = event,
            result = this.call(name, given, event.item_id);
          this.calls.set(call_id, result);
          this.item(event.item_id, "tool").called = result.then((output) => [
            { id: event.item_id, type: "function_call", call_id, name, arguments: given },
            { type: "function_call_output", call_id, output },
          ]);
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
        // Somebody speaks over the answer: playback pauses until the server decides whether it is a barge-in.
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
        // The server keeps the part of a cut answer that it counts as heard.
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
    // A short answer may be complete before its first audio is played.
    if (!this.playing && !this.waiting.size) this.state("listening");
    if (this.calls.size) this.answerCalls(status === "completed");
  }

  /**
   * The time of performance.now() at a position in the session's audio.
   * @param {number} session_ms
   * @param {number} now
   */
  at(session_ms, now) {
    return this.began === null ? now : Math.min(now, this.began + session_ms);
  }

  // --- tools ---------------------------------------------------------------------------------------------------------

  /**
   * Call a tool; resolves to its output for the model.
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
      // A tool is the application's own code: the model gets any error that it throws, and can report it.
      console.warn(`the tool ${name} failed`, error);
      output = JSON.stringify({ error: String(error) });
    }
    if (mine === this.starts) this.words(item, "tool", ` → ${output}`, { final: true });
    return output;
  }

  /** @param {boolean} goesOn whether the response was completed, not cut off by the user */
  async answerCalls(goesOn) {
    const { transport } = this,
      calls = [...this.calls];
    this.calls.clear();
    for (const [call_id, result] of calls) {
      const output = await result;
      // Another session may have begun meanwhile.
      if (transport !== this.transport) return;
      this.send("conversation.item.create", { item: { type: "function_call_output", call_id, output } });
    }
    // The user may have spoken meanwhile: wait until that answer is done.
    if (goesOn) await this.idle();
    if (!goesOn || transport !== this.transport) return;
    this.rounds += 1;
    this.respond(this.rounds >= MAX_CALL_ROUNDS ? { response: { tool_choice: "none" } } : {});
  }

  // --- playback ------------------------------------------------------------------------------------------------------

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
      // If the item is not final, more audio may arrive.
      if (!item || item.final) this.wholly(this.playing);
      this.playing = null;
      this.span("assistant", false, now);
      this.state(this.responses.size ? "thinking" : "listening");
    }
  }

  /**
   * Mark an item as played to its end.
   * @param {string} id
   */
  wholly(id) {
    const item = this.items.get(id);
    if (!item) return;
    item.heard_s = item.total_s;
    if (this.duplex) this.acknowledge(id, item.total_s, true);
    this.show(item);
  }

  /** The user speaks or interrupts: stop playback, and report to the server how much was heard. */
  async silence() {
    const { player } = this;
    // With WebRTC, the server stops the audio.
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
      // An item that had not begun to play was not heard at all.
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
   * Report how much of an item was heard, by the audio clock, at most five times a second.
   * @param {string} item_id
   * @param {number} heard_s
   */
  acknowledge(item_id, heard_s, now = false) {
    if (!now && heard_s - this.acked_s < 0.2 && heard_s >= this.acked_s) return;
    this.acked_s = heard_s;
    this.send("playback.ack", { item_id, played_ms: Math.round(heard_s * 1000) });
  }

  // --- events for the application ------------------------------------------------------------------------------------

  /**
   * @param {string} id
   * @param {Line["who"]} who
   */
  item(id, who) {
    let item = this.items.get(id);
    if (!item) {
      const line = { id, who, text: "", heard: 0, cut: false, final: false };
      item = { ...line, total_s: 0, heard_s: 0, kept: null, silenced: false, called: null };
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
      // Text and audio arrive at different times, so the estimate must not decrease.
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
