// @google/genai: a spoken turn, typed turns, an interruption, a handle. gemini.mjs URL RECORDING.wav (PCM16 at 24 kHz)
import { readFileSync } from "node:fs";
import { GoogleGenAI, Modality } from "@google/genai";

const [url, recording] = process.argv.slice(2);
const TURNS = Number(process.env.TURNS ?? 3);
const STEP = 4800; // 0.1 s of PCM16 at 24 kHz
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const ai = new GoogleGenAI({ apiKey: "none", httpOptions: { baseUrl: url } });
const config = {
  responseModalities: [Modality.AUDIO],
  systemInstruction: "You are terse.",
  inputAudioTranscription: {},
  outputAudioTranscription: {},
  sessionResumption: {},
};
const seen = { frames: 0, sound: 0, heard: "", complete: 0, interrupted: 0, handle: "" };

function take(message) {
  seen.frames++;
  const content = message.serverContent;
  for (const part of content?.modelTurn?.parts ?? []) seen.sound += Buffer.from(part.inlineData?.data ?? "", "base64").length;
  seen.heard += content?.inputTranscription?.text ?? "";
  if (content?.turnComplete) seen.complete++;
  if (content?.interrupted) seen.interrupted++;
  seen.handle = message.sessionResumptionUpdate?.newHandle ?? seen.handle;
}

async function until(what, condition, seconds = 90) {
  for (let k = 0; k < seconds * 20; k++) {
    if (condition()) return;
    await sleep(50);
  }
  throw new Error(`never: ${what} ${JSON.stringify({ ...seen, handle: undefined })}`);
}

async function open(more = {}) {
  let closed = "";
  const callbacks = { onmessage: take, onerror: (e) => { closed = e.message; }, onclose: (e) => { closed = e.reason; } };
  const session = await ai.live.connect({ model: "gemini-live-2.5-flash-preview", config: { ...config, ...more }, callbacks });
  return [session, () => closed];
}

async function typed(session, text) {
  const before = seen.complete;
  session.sendClientContent({ turns: [{ role: "user", parts: [{ text }] }], turnComplete: true });
  await until(`an answer to ${text}`, () => seen.complete > before);
}

async function speak(session, wav, silence_s) {
  const pcm = Buffer.concat([wav, Buffer.alloc(48000 * silence_s)]);
  for (let at = 0; at < pcm.length; at += STEP) {
    const data = pcm.subarray(at, at + STEP).toString("base64");
    session.sendRealtimeInput({ audio: { data, mimeType: "audio/pcm;rate=24000" } });
    await sleep(100);
  }
}

const wav = readFileSync(recording).subarray(44);
let [session] = await open();
await speak(session, wav, 1.5);
await until("a spoken answer", () => seen.complete > 0 && seen.sound > 12_000);
await until("what was heard", () => seen.heard.includes("surpassed"));
for (let number = 0; number < TURNS; number++) await typed(session, `Say the number ${number}.`);
session.sendClientContent({ turns: [{ role: "user", parts: [{ text: "Count slowly from one to one hundred, in words." }] }], turnComplete: true });
const before = seen.sound;
await until("a long answer", () => seen.sound > before + 48_000);
await speak(session, wav, 1.5);
await until("an interruption", () => seen.interrupted > 0);
session.close();
await sleep(500);
[session] = await open({ sessionResumption: { handle: seen.handle } });
await typed(session, "Say hello.");
session.close();
console.log(`@google/genai: ${seen.frames} frames, ${(seen.sound / 48_000).toFixed(1)} s of sound, resumed`);
process.exit(0);
