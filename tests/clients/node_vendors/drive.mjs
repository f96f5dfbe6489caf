// @elevenlabs/elevenlabs-js, assemblyai and @cartesia/cartesia-js: speech and live transcripts. drive.mjs URL RECORDING.wav
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { ElevenLabsClient, RealtimeEvents } from "@elevenlabs/elevenlabs-js";
import { StreamingTranscriber } from "assemblyai";

// As an ES module, the package does not find `ws`.
const { Cartesia } = createRequire(import.meta.url)("@cartesia/cartesia-js");

const [url, recording] = process.argv.slice(2);
const ws = url.replace("http", "ws");
const RATE_HZ = 24_000, TURNS = 3, TEXT = "Hello there.";
const ELEVENLABS_VOICE = "21m00Tcm4TlvDq8ikWAM", CARTESIA_VOICE = "e8e5fffb-252c-436d-b842-8879b84445b6";
const pcm = readFileSync(recording).subarray(44);
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function check(holds, what) {
  if (!holds) throw new Error(JSON.stringify(what));
}

async function until(what, condition, seconds = 60) {
  for (let k = 0; k < seconds * 20; k++) {
    if (condition()) return;
    await sleep(50);
  }
  throw new Error(`never: ${what}`);
}

async function read(stream) {
  let length = 0;
  for await (const part of stream) length += part.length;
  return length;
}

async function elevenlabs() {
  const client = new ElevenLabsClient({ apiKey: "none", baseUrl: url });
  const tts = client.textToSpeech, asked = { text: TEXT, modelId: "eleven_flash_v2_5" };
  const mp3 = await read(await tts.convert(ELEVENLABS_VOICE, asked));
  const bytes = await read(await tts.stream(ELEVENLABS_VOICE, { ...asked, outputFormat: "pcm_16000" }));
  check(mp3 > 5_000 && bytes > 10_000, [mp3, bytes]);
  const timed = await tts.convertWithTimestamps(ELEVENLABS_VOICE, asked);
  check(timed.alignment.characters.join("") === TEXT, timed.alignment);
  let chunks = 0;
  for await (const chunk of await tts.streamWithTimestamps(ELEVENLABS_VOICE, asked)) chunks += chunk.audioBase64 ? 1 : 0;
  check(chunks > 0, chunks);
  const file = new Blob([readFileSync(recording)]);
  const heard = await client.speechToText.convert({ modelId: "scribe_v1", file });
  check(heard.text.includes("surpassed") && heard.words.length, heard);

  const connection = await client.speechToText.realtime.connect({
    modelId: "scribe_v2_realtime", audioFormat: "pcm_24000", sampleRate: RATE_HZ, includeTimestamps: true,
  });
  const texts = [], failures = [];
  let started = false;
  connection.on(RealtimeEvents.SESSION_STARTED, () => { started = true; });
  connection.on(RealtimeEvents.COMMITTED_TRANSCRIPT_WITH_TIMESTAMPS, (found) => texts.push(found.text));
  connection.on(RealtimeEvents.ERROR, (error) => failures.push(error));
  await until("session_started", () => started);
  for (let turn = 1; turn <= TURNS; turn++) {
    connection.send({ audioBase64: pcm.toString("base64") });
    connection.commit();
    await until(`commit ${turn}`, () => texts.length >= turn || failures.length);
  }
  connection.close();
  check(!failures.length && texts.every((text) => text.includes("surpassed")), [failures, texts]);
  return `${bytes} bytes of speech and ${texts.length} commits`;
}

async function assemblyai() {
  const transcriber = new StreamingTranscriber({
    websocketBaseUrl: `${ws}/v3/ws`, apiKey: "none", sampleRate: RATE_HZ, speechModel: "universal-streaming-english",
    connectTimeout: 20_000,
  });
  const turns = [], failures = [];
  transcriber.on("turn", (turn) => { if (turn.end_of_turn) turns.push(turn.transcript); });
  transcriber.on("error", (error) => failures.push(error.message));
  await transcriber.connect();
  for (let turn = 1; turn <= TURNS; turn++) {
    for (let at = 0; at < pcm.length; at += 4800) transcriber.sendAudio(pcm.subarray(at, at + 4800));
    transcriber.forceEndpoint();
    await until(`turn ${turn}`, () => turns.join(" ").split("surpassed").length > turn || failures.length);
  }
  await transcriber.close();
  check(!failures.length, failures);
  return `${turns.length} turns`;
}

async function cartesia() {
  const client = new Cartesia({ apiKey: "none", baseURL: url });
  const asked = {
    model_id: "sonic-3", voice: { mode: "id", id: CARTESIA_VOICE },
    output_format: { container: "raw", encoding: "pcm_s16le", sample_rate: RATE_HZ },
  };
  const file = await (await client.tts.generate({ ...asked, transcript: TEXT })).arrayBuffer();
  check(file.byteLength > 10_000, file.byteLength);
  const socket = await client.tts.websocket();
  let bytes = 0, words = 0;
  for (let turn = 0; turn < TURNS; turn++) {
    const context = socket.context({ ...asked, contextId: `turn-${turn}`, add_timestamps: true });
    await context.push({ transcript: "Hello there. " });
    await context.push({ transcript: "How are you?" });
    await context.no_more_inputs();
    for await (const event of context.receive()) {
      if (event.audio) bytes += event.audio.length;
      if (event.type === "timestamps") words += event.word_timestamps.words.length;
    }
  }
  socket.close();
  check(bytes > 24_000 && words >= 5 * TURNS, [bytes, words]);
  return `${bytes} bytes of speech and ${words} words`;
}

const lines = [];
for (const drive of [elevenlabs, assemblyai, cartesia]) lines.push(`${drive.name} ${await drive()}`);
console.log(`node_vendors: ${lines.join(", ")}`);
process.exit(0);
