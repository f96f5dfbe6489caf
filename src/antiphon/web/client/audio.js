// @ts-check
// The microphone and the loudspeaker. All audio that is sent and played is mono at 24 kHz.

import { device as ask } from "./errors.js";

export const RATE = 24000;

/** @type {Promise<AudioContext> | null} */
let context = null;

async function made() {
  const ctx = new AudioContext({ latencyHint: "interactive" });
  await ctx.audioWorklet.addModule(new URL("./worklets.js", import.meta.url));
  return ctx;
}

/** The audio context that all sessions share. It is created on the first click, as browsers require. */
export async function audio() {
  context ??= made();
  try {
    const ctx = await context;
    await ctx.resume();
    return ctx;
  } catch (error) {
    context = null;
    throw error;
  }
}

/**
 * Play through this loudspeaker from now on, if the browser lets a page choose.
 * @param {string} device
 * @param {HTMLMediaElement | null} [element]
 */
export async function through(device, element) {
  const player = /** @type {any} */ (element ?? (await context));
  if (player?.setSinkId) await player.setSinkId(device);
}

/**
 * The microphone's stream.
 * @param {string | undefined} device the id of a device, or "" for the default one
 * @param {boolean} echo whether the microphone also hears the loudspeaker
 */
export function microphone(device, echo) {
  return ask("microphone", (media) =>
    media.getUserMedia({
      audio: {
        deviceId: device ? { exact: device } : undefined,
        echoCancellation: echo,
        noiseSuppression: echo,
        autoGainControl: true,
        channelCount: 1,
      },
    }),
  );
}

/** @param {MediaStream | null | undefined} stream */
export function release(stream) {
  for (const track of stream?.getTracks() ?? []) track.stop();
}

/**
 * Call `onPcm` with PCM16 for every 20 ms of the stream. Returns a function that stops it.
 * @param {MediaStream} stream
 * @param {(pcm: ArrayBuffer) => void} onPcm
 */
export async function capture(stream, onPcm) {
  const ctx = await audio();
  const source = ctx.createMediaStreamSource(stream);
  const node = new AudioWorkletNode(ctx, "microphone", { numberOfOutputs: 0 });
  node.port.onmessage = ({ data }) => onPcm(data);
  source.connect(node);
  return () => {
    source.disconnect();
    node.port.onmessage = null;
    node.port.postMessage({ close: true });
    release(stream);
  };
}

/** Measures the current volume of a node. */
export class Meter {
  /** @param {AudioNode} node */
  constructor(node) {
    this.source = node;
    this.analyser = new AnalyserNode(node.context, { fftSize: 2048 });
    this.samples = new Float32Array(this.analyser.fftSize);
    this.isClosed = false;
    node.connect(this.analyser);
  }
  /** @param {MediaStream} stream */
  static async of(stream) {
    return new Meter((await audio()).createMediaStreamSource(stream));
  }
  /** The highest amplitude of the last 40 ms, from 0 to 1. */
  get level() {
    this.analyser.getFloatTimeDomainData(this.samples);
    let highest = 0;
    for (const sample of this.samples) highest = Math.max(highest, Math.abs(sample));
    return Math.min(1, highest);
  }
  close() {
    // Close it only once: the player and the owner of the meter may both call this.
    if (!this.isClosed) this.source.disconnect(this.analyser);
    this.isClosed = true;
  }
}

/** @typedef {{sounding: boolean, item: string | null, heard: number}} Playing `heard`: seconds of `item` so far */

/** A queue of audio to play. */
export class Player {
  /**
   * @param {AudioWorkletNode} node
   * @param {(playing: Playing) => void} onState
   */
  constructor(node, onState) {
    this.node = node;
    this.meter = new Meter(node);
    this.flushes = 0;
    /** @type {Map<number, (heard: Record<string, number>) => void>} */
    this.waiting = new Map();
    node.port.onmessage = ({ data }) => {
      if (data.flushed) this.waiting.get(data.flushed)?.(data.heard);
      else onState(data);
    };
  }
  /** @param {(playing: Playing) => void} [onState] */
  static async open(onState = () => {}) {
    const ctx = await audio();
    const node = new AudioWorkletNode(ctx, "player", { numberOfInputs: 0, outputChannelCount: [2] });
    node.connect(ctx.destination);
    return new Player(node, onState);
  }
  /**
   * @param {string} item
   * @param {Float32Array} pcm
   */
  play(item, pcm) {
    if (pcm.length) this.node.port.postMessage({ item, pcm }, [pcm.buffer]);
  }
  /**
   * Pause, or continue from the same position.
   * @param {boolean} held
   */
  hold(held) {
    this.node.port.postMessage({ hold: held });
  }
  /**
   * Drop the queue at once; resolves with the number of samples heard of each item.
   * @returns {Promise<Record<string, number>>}
   */
  flush() {
    const id = ++this.flushes;
    /** @type {Promise<Record<string, number>>} */
    const heard = new Promise((resolve) => {
      this.waiting.set(id, resolve);
      this.node.port.postMessage({ flush: id });
    });
    return heard.finally(() => this.waiting.delete(id));
  }
  /** Stop for good. */
  close() {
    this.node.port.onmessage = null;
    this.node.port.postMessage({ close: true });
    this.meter.close();
    this.node.disconnect();
    for (const resolve of this.waiting.values()) resolve({});
  }
}

/** @param {ArrayBuffer} buffer */
export function toBase64(buffer) {
  let text = "";
  for (const byte of new Uint8Array(buffer)) text += String.fromCharCode(byte);
  return btoa(text);
}

/** @param {Uint8Array} bytes */
export function fromPcm16(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Float32Array.from({ length: view.byteLength >> 1 }, (_, k) => view.getInt16(2 * k, true) / 32768);
}

/** @param {string} text */
export function bytesOf(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}
