// @ts-check
// The audio without a final line yet, which is sent again if its session ends early.

const BYTES_PER_MS = 48; // PCM16 at 24 kHz

/** @typedef {{from: number, to: number}} Span in ms of all audio */

export class KeptSound {
  /** @param {number} [most_ms] the limit on kept audio, in ms; above it the oldest is dropped */
  constructor(most_ms = 60000) {
    this.most_ms = most_ms;
    /** @type {(Span & {pcm: ArrayBuffer})[]} */
    this.pieces = [];
    // The end of all audio, and the end of the audio that was sent to a session, in ms.
    this.to = this.sent = 0;
    /** @type {Span | null} Audio that was dropped before any session got it. */
    this.lost = null;
  }
  /** The start of the oldest piece. */
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
  /** Drop all kept audio. It counts as lost, even if it was sent to a session. */
  giveUp() {
    this.sent = Math.min(this.sent, this.from);
    this.drop(this.to);
  }
  /** @param {number} ms all audio before it has its final line */
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
