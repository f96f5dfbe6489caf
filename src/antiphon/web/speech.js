// Text to speech: the sound is played while it is still being made.

import { fromPcm16, Player, RATE } from "./audio.js";
import { failed, withKey } from "./errors.js";
import { save, wavHeader } from "./files.js";

const $ = (id) => document.getElementById(id);

export class Speech {
  constructor(page) {
    this.page = page;
    this.made = this.sounding = false; // still being made; heard now
    this.parts = [];
    this.rate = RATE;
    $("speak").onsubmit = (event) => {
      event.preventDefault();
      this.speak();
    };
    $("speech-stop").onclick = () => this.stop();
    $("speech-save").onclick = () => {
      const bytes = this.parts.reduce((sum, part) => sum + part.length, 0);
      save("speech.wav", "audio/wav", wavHeader(this.rate, bytes), ...this.parts);
    };
    this.paint();
  }
  paint() {
    $("speech-stop").disabled = !this.made && !this.sounding;
    $("speech-save").disabled = this.made || !this.parts.length;
  }
  stop() {
    this.abort?.abort();
    this.player?.flush();
    this.made = this.sounding = false;
    this.paint();
  }
  async speak() {
    this.stop();
    this.page.clear("speech");
    const mine = (this.abort = new AbortController());
    this.made = true;
    this.parts = [];
    $("speech-state").textContent = "Being made…";
    this.paint();
    try {
      this.player ??= await Player.open(({ sounding }) => {
        this.sounding = sounding;
        this.paint();
      });
      await this.read(mine);
    } catch (error) {
      if (error.name !== "AbortError") {
        $("speech-state").textContent = "";
        this.page.fail("speech", error);
      } else if (this.abort === mine) $("speech-state").textContent = "Stopped";
    }
    if (this.abort === mine) {
      this.made = false;
      this.paint();
    }
  }
  async read({ signal }) {
    const began = performance.now(),
      { key } = this.page;
    const answer = await fetch("v1/audio/speech", {
      method: "POST",
      signal,
      headers: withKey(key, { "Content-Type": "application/json" }),
      body: JSON.stringify({
        model: "default",
        input: $("speech-text").value,
        voice: $("speech-voice").value,
        speed: Number($("speed").value) || 1,
        response_format: "pcm",
        stream: true,
      }),
    });
    if (!answer.ok) throw await failed(answer, key);
    this.rate = Number(answer.headers.get("X-Sample-Rate")) || RATE;
    let rest = new Uint8Array(0),
      samples = 0,
      first = null;
    const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;
    for (const reader = answer.body.getReader(); ;) {
      const { done, value } = await reader.read();
      if (done) break;
      first ??= performance.now() - began;
      const bytes = new Uint8Array(rest.length + value.length);
      bytes.set(rest);
      bytes.set(value, rest.length);
      const even = bytes.length & ~1;
      rest = bytes.slice(even);
      samples += even / 2;
      this.parts.push(bytes.slice(0, even));
      this.player.play("speech", fromPcm16(bytes.subarray(0, even)));
      $("speech-state").textContent =
        `First sound after ${first.toFixed(0)} ms; ${(samples / this.rate).toFixed(1)} s of sound`;
    }
    $("speech-state").textContent += `, made in ${seconds(performance.now() - began)}`;
  }
}
