// Runs on the audio thread: converts the microphone to PCM16 at 24 kHz, and plays a queue and counts what was heard.

const RATE = 24000;

class Microphone extends AudioWorkletProcessor {
  constructor() {
    super();
    this.step = sampleRate / RATE;
    this.at = 0;
    this.sum = 0;
    this.count = 0;
    this.out = new Int16Array(480);
    this.filled = 0;
    this.closed = false;
    this.port.onmessage = ({ data }) => (this.closed = data.close);
  }
  process([input]) {
    const sound = input[0];
    if (!sound || this.closed) return !this.closed;
    for (const sample of sound) {
      // The mean of the input samples of one output sample: a low-pass that is good enough for speech.
      this.sum += sample;
      this.count++;
      this.at++;
      if (this.at < this.step) continue;
      this.at -= this.step;
      const value = Math.max(-1, Math.min(1, this.sum / this.count));
      this.sum = 0;
      this.count = 0;
      this.out[this.filled++] = value * 32767;
      if (this.filled === this.out.length) {
        const full = this.out;
        this.port.postMessage(full.buffer, [full.buffer]);
        this.out = new Int16Array(480);
        this.filled = 0;
      }
    }
    return true;
  }
}

class Player extends AudioWorkletProcessor {
  constructor() {
    super();
    this.queue = [];
    this.at = 0;
    this.sent = 0;
    this.sounding = false;
    this.held = false;
    this.gain = 1;
    this.played = new Map(); // samples at 24 kHz that were heard, by item
    this.closed = false;
    this.port.onmessage = ({ data }) => {
      if (data.close) {
        this.closed = true;
        this.queue = [];
      } else if (data.flush) {
        const heard = Object.fromEntries(this.played);
        this.queue = [];
        this.at = 0;
        this.played.clear();
        this.held = false;
        this.port.postMessage({ flushed: data.flush, heard });
      } else if (data.hold !== undefined) this.held = data.hold;
      else this.queue.push(data);
    };
  }
  process(_, [output]) {
    if (this.closed) return false;
    const out = output[0],
      step = RATE / sampleRate;
    let item = null;
    // On hold, the audio fades within 10 ms and pauses at the exact sample from which it continues.
    const fade = 1 / (0.01 * sampleRate);
    for (let i = 0; i < out.length; i++) {
      this.gain = this.held ? Math.max(0, this.gain - fade) : Math.min(1, this.gain + fade);
      const head = this.queue[0];
      if (!head || this.gain === 0) {
        out[i] = 0;
        continue;
      }
      const k = Math.floor(this.at),
        next = head.pcm[Math.min(k + 1, head.pcm.length - 1)];
      out[i] = this.gain * (head.pcm[k] + (next - head.pcm[k]) * (this.at - k));
      item = head.item;
      this.at += step;
      this.played.set(item, (this.played.get(item) || 0) + step);
      if (this.at >= head.pcm.length) {
        this.at -= head.pcm.length;
        this.queue.shift();
        // No caller asks about an item that was played to its end.
        if (this.queue.length && this.queue[0].item !== head.item) this.played.delete(head.item);
      }
    }
    // An item on hold has not ended.
    if (item === null && this.held && this.queue.length) item = this.queue[0].item;
    for (let c = 1; c < output.length; c++) output[c].set(out);
    const sounding = item !== null;
    if (sounding !== this.sounding || (sounding && currentTime - this.sent > 0.05)) {
      this.sent = currentTime;
      this.port.postMessage({ sounding, item, heard: item === null ? 0 : (this.played.get(item) || 0) / RATE });
      this.sounding = sounding;
    }
    return true;
  }
}

registerProcessor("microphone", Microphone);
registerProcessor("player", Player);
