// Text to speech: the sound is played while it is still being made.

import { fromPcm16, Player, RATE } from "./audio.js";

const $ = (id) => document.getElementById(id);

export class Speech {
  constructor(page) {
    this.page = page;
    $("speak").onsubmit = (event) => { event.preventDefault(); this.speak(); };
    $("speech-stop").onclick = () => this.stop();
  }
  stop() { this.abort?.abort(); this.player?.flush(); $("speech-stop").disabled = true; }
  async speak() {
    this.stop();
    this.abort = new AbortController();
    try {
      this.player ??= await Player.open(({ sounding }) => { if (!sounding) $("speech-stop").disabled = true; });
      $("speech-stop").disabled = false;
      const began = performance.now();
      const answer = await fetch("v1/audio/speech", {
        method: "POST", signal: this.abort.signal,
        headers: { "Content-Type": "application/json", ...(this.page.key ? { Authorization: `Bearer ${this.page.key}` } : {}) },
        body: JSON.stringify({ model: "default", input: $("speech-text").value, voice: $("speech-voice").value, speed: Number($("speed").value) || 1, response_format: "pcm", stream: true }),
      });
      if (!answer.ok) throw new Error((await answer.json()).error?.message || `${answer.status}`);
      const rate = Number(answer.headers.get("X-Sample-Rate")) || RATE;
      let rest = new Uint8Array(0), samples = 0, first = null;
      for (const reader = answer.body.getReader(); ;) {
        const { done, value } = await reader.read();
        if (done) break;
        first ??= performance.now() - began;
        const bytes = new Uint8Array(rest.length + value.length);
        bytes.set(rest); bytes.set(value, rest.length);
        const even = bytes.length & ~1;
        rest = bytes.slice(even);
        samples += even / 2;
        this.player.play("speech", fromPcm16(bytes.subarray(0, even)));
        $("speech-state").textContent = `first sound after ${first.toFixed(0)} ms; ${(samples / rate).toFixed(1)} s of sound`;
      }
      $("speech-state").textContent += `, made in ${((performance.now() - began) / 1000).toFixed(2)} s`;
    } catch (error) { if (error.name !== "AbortError") this.page.fail(error); }
  }
}
