// The microphone and the loudspeaker of this page. All sound is 24 kHz, mono.

import { device as ask } from "./errors.js";

export const RATE = 24000;

let context = null;

/** The page's one audio context; made on the first click, as browsers ask. */
export async function audio() {
  if (!context) {
    const made = new AudioContext({ latencyHint: "interactive" });
    await made.audioWorklet.addModule("web/worklets.js");
    context = made;
  }
  await context.resume();
  return context;
}

/** Play through this loudspeaker from now on, where the browser lets a page choose. */
export async function through(device, element) {
  const player = element ?? context;
  if (player?.setSinkId) await player.setSinkId(device);
}

/** The microphone's stream. `echo`: it also hears the loudspeaker. */
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

/** Call `onPcm(ArrayBuffer of PCM16)` every 20 ms of the stream; returns how to stop. */
export async function capture(stream, onPcm) {
  const ctx = await audio();
  const source = ctx.createMediaStreamSource(stream);
  const node = new AudioWorkletNode(ctx, "microphone", { numberOfOutputs: 0 });
  node.port.onmessage = ({ data }) => onPcm(data);
  source.connect(node);
  return () => {
    source.disconnect();
    node.port.onmessage = null;
    for (const t of stream.getTracks()) t.stop();
  };
}

/** A queue of sound. `onState({sounding, item, heard})`: heard is seconds of `item`. */
export class Player {
  static async open(onState = () => {}) {
    const ctx = await audio();
    const player = new Player();
    player.node = new AudioWorkletNode(ctx, "player", { numberOfInputs: 0, outputChannelCount: [2] });
    player.node.port.onmessage = ({ data }) => {
      if (data.flushed) player.waiting.get(data.flushed)?.(data.heard);
      else onState(data);
    };
    player.node.connect(ctx.destination);
    return player;
  }
  waiting = new Map();
  flushes = 0;
  /** pcm: Float32Array. */
  play(item, pcm) {
    if (pcm.length) this.node.port.postMessage({ item, pcm }, [pcm.buffer]);
  }
  /** Wait where it is, or go on from there. */
  hold(held) {
    this.node.port.postMessage({ hold: held });
  }
  /** Silence at once; resolves with the samples heard of each item. */
  flush() {
    const id = ++this.flushes;
    return new Promise((resolve) => {
      this.waiting.set(id, resolve);
      this.node.port.postMessage({ flush: id });
    }).finally(() => this.waiting.delete(id));
  }
  close() {
    this.node.disconnect();
  }
}

export function toBase64(buffer) {
  let text = "";
  for (const byte of new Uint8Array(buffer)) text += String.fromCharCode(byte);
  return btoa(text);
}

export function fromPcm16(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Float32Array.from({ length: view.byteLength >> 1 }, (_, k) => view.getInt16(2 * k, true) / 32768);
}

export function fromBase64(text) {
  return fromPcm16(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)));
}
