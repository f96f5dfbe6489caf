// @deepgram/sdk: live transcripts, Flux, a file, and speech in both forms. drive.mjs URL RECORDING.wav
import { readFileSync } from "node:fs";
import { DeepgramClient } from "@deepgram/sdk";

const [url, recording] = process.argv.slice(2);
const ws = url.replace("http", "ws");
const RATE_HZ = 24_000, TURNS = 5;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const client = new DeepgramClient({
  apiKey: "none",
  environment: { base: url, production: ws, agent: ws, agentRest: url },
});

async function until(what, condition, seconds = 60) {
  for (let k = 0; k < seconds * 20; k++) {
    if (condition()) return;
    await sleep(50);
  }
  throw new Error(`never: ${what}`);
}

async function opened(connection) {
  const seen = { messages: [], bytes: 0, errors: [], closed: false };
  connection.on("message", async (data) => {
    if (typeof data === "object" && data.type) seen.messages.push(data);
    else seen.bytes += data.byteLength ?? data.size ?? 0;
  });
  connection.on("error", (error) => seen.errors.push(error));
  connection.on("close", () => { seen.closed = true; });
  connection.connect();
  await connection.waitForOpen();
  seen.of = (type, test = () => true) => seen.messages.filter((m) => m.type === type && test(m));
  return seen;
}

async function say(connection, pcm, silence_s) {
  const data = Buffer.concat([pcm, Buffer.alloc(2 * RATE_HZ * silence_s)]);
  for (let at = 0; at < data.length; at += 9600) {
    connection.sendMedia(data.subarray(at, at + 9600));
    await sleep(5);
  }
}

const wav = readFileSync(recording), pcm = wav.subarray(44);
const raw = { encoding: "linear16", sample_rate: RATE_HZ };

const live = await client.listen.v1.connect({
  model: "nova-3", language: "en", ...raw, interim_results: "true", punctuate: "true", keyterm: ["surpassed", "Kaspar"],
});
const heard = await opened(live);
for (let turn = 1; turn <= TURNS; turn++) {
  await say(live, pcm, turn % 2 ? 1.5 : 0.1);
  if (turn % 2 === 0) live.sendFinalize({ type: "Finalize" });
  await until(`turn ${turn}`, () => heard.of("Results", (m) => m.is_final).length >= turn);
}
live.sendCloseStream({ type: "CloseStream" });
await until("Metadata", () => heard.of("Metadata").length);
const texts = heard.of("Results", (m) => m.is_final).map((m) => m.channel.alternatives[0].transcript);
if (texts.filter((text) => text.includes("surpassed")).length < TURNS) throw new Error(texts.join(" | "));
live.close();

const flux = await client.listen.v2.connect({ model: "flux-general-en", ...raw, eager_eot_threshold: 0.4 });
const turns = await opened(flux);
await say(flux, pcm, 3);
await until("EndOfTurn", () => turns.of("TurnInfo", (m) => m.event === "EndOfTurn").length);
flux.close();

const voice = await client.speak.v1.connect({ model: "aura-2-thalia-en", encoding: "linear16", sample_rate: RATE_HZ });
const spoken = await opened(voice);
voice.sendText({ type: "Speak", text: "Hello there. How are you?" });
voice.sendFlush({ type: "Flush" });
await until("Flushed", () => spoken.of("Flushed").length);
if (spoken.bytes < 24_000) throw new Error(`${spoken.bytes} bytes of speech`);
voice.close();

const file = await client.listen.v1.media.transcribeFile(wav, { model: "nova-3", smart_format: true });
const transcript = file.results.channels[0].alternatives[0].transcript;
if (!transcript.includes("surpassed")) throw new Error(transcript);
const mp3 = await (await client.speak.v1.audio.generate({ text: "Hello there.", model: "aura-2-thalia-en" })).arrayBuffer();
if (mp3.byteLength < 1000) throw new Error(`${mp3.byteLength} bytes of MP3`);
for (const seen of [heard, turns, spoken]) if (seen.errors.length) throw new Error(String(seen.errors[0]?.message));
console.log(`node_deepgram: ${texts.length} turns, ${turns.of("TurnInfo").length} TurnInfo, ${spoken.bytes} bytes of speech`);
process.exit(0);
