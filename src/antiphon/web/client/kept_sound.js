// @ts-check
// The sound of which there is no final line yet: it is sent again where a session ends before it.

const BYTES_PER_MS = 48; // PCM16 at 24 kHz

/** @typedef {{from: number, to: number}} Span ms of all sound */

export class KeptSound {
  /** @param {number} [most_ms] how much is kept; beyond it the oldest is dropped */
  constructor(most_ms = 60000) {
    this.most_ms = most_ms;
    /** @type {(Span & {pcm: ArrayBuffer})[]} */
    this.pieces = [];
    // How much sound there was, and up to where a session was given it.
    this.to = this.sent = 0;
    /** @type {Span | null} What was dropped that no session was given. */
    this.lost = null;
  }
  /** Where the oldest piece begins. */
  get from() {
    return this.pieces[0]?.from ?? this.to;
  }
  /** @param {ArrayBuffer} pcm */
  add(pcm) {
    const from = this.to;
    this.to += pcm.byteLength / BYTES_PER_MS;
    this.pieces.push({ from, to: this.to, pcm });
    this.drop(this.to - this.most_ms);
  }
  /** Give up all that is kept: it counts as lost, also where a session was given it. */
  giveUp() {
    this.sent = Math.min(this.sent, this.from);
    this.drop(this.to);
  }
  /** @param {number} ms what lies before it has its final line */
  settle(ms) {
    while (this.pieces.length && this.pieces[0].to <= ms) this.pieces.shift();
  }
  /** @param {number} ms */
  drop(ms) {
    while (this.pieces.length && this.pieces[0].from < ms) {
      const { from, to } = /** @type {Span} */ (this.pieces.shift());
      if (to > this.sent) this.lost = { from: this.lost?.from ?? from, to };
    }
  }
}
