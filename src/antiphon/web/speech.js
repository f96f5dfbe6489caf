// The speech tab: speaks a text while the server generates it, and offers the audio for download.

import { SpokenText } from "./client/antiphon.js";
import { save, wavHeader } from "./files.js";

const $ = (id) => document.getElementById(id);
const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;

export class SpeechTab {
  constructor(page) {
    this.page = page;
    this.spoken = null;
    this.making = this.sounding = false;
    $("speak").onsubmit = (event) => {
      event.preventDefault();
      this.speak();
    };
    $("speech-stop").onclick = () => this.spoken?.stop();
    $("speech-save").onclick = () => {
      const { parts, rate } = this.spoken;
      const bytes = parts.reduce((sum, part) => sum + part.length, 0);
      save("speech.wav", "audio/wav", wavHeader(rate, bytes), ...parts);
    };
    this.paint();
  }
  paint(text) {
    $("speech-stop").disabled = !this.making && !this.sounding;
    $("speech-save").disabled = this.making || !this.spoken?.parts.length;
    if (text !== undefined) $("speech-state").textContent = text;
  }
  async speak() {
    this.spoken?.stop();
    this.page.clear("speech");
    const spoken = new SpokenText($("speech-text").value, {
      key: this.page.key,
      voice: $("speech-voice").value,
      speed: Number($("speed").value) || 1,
    });
    const mine = () => this.spoken === spoken;
    this.spoken = spoken;
    this.making = true;
    this.sounding = false;
    this.paint("Generating…");
    spoken.on("sounding", (sounding) => {
      if (!mine()) return;
      this.sounding = sounding;
      this.paint();
    });
    spoken.on("made", ({ first_ms, seconds: length, made_ms }) => {
      if (!mine()) return;
      const made = made_ms === null ? "" : `, generated in ${seconds(made_ms)}`;
      this.paint(`First sound after ${first_ms.toFixed(0)} ms; ${length.toFixed(1)} s of sound${made}`);
    });
    try {
      await spoken.speak();
    } catch (error) {
      if (!mine()) return;
      const stopped = error.name === "AbortError";
      this.paint(stopped ? "Stopped" : "");
      if (!stopped) this.page.fail("speech", error);
    }
    if (!mine()) return;
    this.making = false;
    this.paint();
  }
}
