// @ts-check
// Text to speech: the audio is played while the server still generates it.

import { fromPcm16, Player, RATE } from "./audio.js";
import { failed } from "./errors.js";
import { Server, Teller } from "./server.js";

/**
 * @typedef {object} Options
 * @property {string} [voice]
 * @property {number} [speed] 0.25 to 4
 *
 * @typedef {object} SpeechTells
 * @property {{first_ms: number, seconds: number, made_ms: number | null}} made the delay of the first audio, the
 *   seconds of audio so far, and, when it is complete, the time that it took
 * @property {boolean} sounding whether audio is playing
 */

/**
 * Speaks one text.
 * @extends {Teller<SpeechTells>}
 */
export class SpokenText extends Teller {
  /**
   * @param {string} text
   * @param {Options & import("./server.js").ServerOptions} [options]
   */
  constructor(text, options = {}) {
    super();
    this.text = text;
    this.server = new Server(options);
    this.options = options;
    /** Hz. */
    this.rate = RATE;
    this.isMade = false;
    /** @type {Uint8Array[]} mono PCM16 */
    this.parts = [];
    this.aborting = new AbortController();
    /** @type {Player | null} */
    this.player = null;
  }
  /** Speak the text; resolves when all its audio has arrived. Rejects with an AbortError if it is stopped. */
  async speak() {
    const began = performance.now();
    if (this.player) throw new Error("This text was spoken already: make another one.");
    this.player = await Player.open(({ sounding }) => {
      this.tell("sounding", sounding);
      if (!sounding && this.isMade) this.close();
    });
    const answer = await this.server.fetch("v1/audio/speech", {
      method: "POST",
      signal: this.aborting.signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        model: "default",
        input: this.text,
        ...(this.options.voice ? { voice: this.options.voice } : {}),
        speed: this.options.speed ?? 1,
        response_format: "pcm",
        sample_rate: RATE,
        stream: true,
      }),
    });
    if (!answer.ok || !answer.body) throw await failed(answer, this.server.key);
    let rest = new Uint8Array(0),
      samples = 0,
      first_ms = -1;
    const made = (/** @type {number | null} */ made_ms) =>
      this.tell("made", { first_ms, seconds: samples / this.rate, made_ms });
    for (const reader = answer.body.getReader(); ;) {
      const { done, value } = await reader.read();
      if (done) break;
      if (first_ms < 0) first_ms = performance.now() - began;
      const bytes = new Uint8Array(rest.length + value.length);
      bytes.set(rest);
      bytes.set(value, rest.length);
      const even = bytes.length & ~1;
      rest = bytes.slice(even);
      samples += even / 2;
      this.parts.push(bytes.slice(0, even));
      this.player?.play("speech", fromPcm16(bytes.subarray(0, even)));
      made(null);
    }
    this.isMade = true;
    made(performance.now() - began);
  }
  close() {
    this.player?.close();
  }
  /** Stop playback, and cancel the rest. */
  stop() {
    this.aborting.abort();
    this.close();
    this.tell("sounding", false);
  }
}
