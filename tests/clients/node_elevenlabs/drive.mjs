// @elevenlabs/client: a conversation in text, and a spoken one with an interruption and a tool. drive.mjs URL RECORDING.wav
// Its types check every message of the server, by the compiler of TypeScript.
import { execFileSync } from "node:child_process";
import { readFileSync, writeFileSync } from "node:fs";
import { createConnection, setSetupStrategy } from "@elevenlabs/client/internal";
import WebSocket from "ws";

globalThis.WebSocket ??= WebSocket;
const { Conversation } = await import("@elevenlabs/client");

const [url, recording] = process.argv.slice(2);
const ws = url.replace("http", "ws");
const TURNS = Number(process.env.TURNS ?? 20), PIECE = 8000;
const frames = [];
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function check(holds, what) {
  if (!holds) throw new Error(JSON.stringify(what));
}

async function until(what, condition, seconds = 90) {
  for (let k = 0; k < seconds * 50; k++) {
    if (condition()) return;
    await sleep(20);
  }
  throw new Error(`never: ${what}`);
}

// The recording is PCM16 at 24 kHz, and the agent hears 16 kHz: two of three samples, well enough for words.
const pcm24 = new Int16Array(readFileSync(recording).buffer.slice(44));
const pcm = Buffer.alloc(Math.floor(pcm24.length / 3) * 4);
for (let k = 0; k + 2 < pcm24.length; k += 3) {
  pcm.writeInt16LE(pcm24[k], (k / 3) * 4);
  pcm.writeInt16LE(Math.trunc((pcm24[k + 1] + pcm24[k + 2]) / 2), (k / 3) * 4 + 2);
}

// In place of a browser's microphone and loudspeaker.
const line = { words: [], played: 0, cuts: 0 };
setSetupStrategy(async (options) => {
  const connection = await createConnection(options);
  const timer = setInterval(() => {
    const piece = line.words.shift() ?? Buffer.alloc(PIECE);
    connection.sendMessage({ user_audio_chunk: piece.toString("base64") });
  }, 250);
  connection.addListener((event) => { line.played += Buffer.from(event.audio_base_64, "base64").length; });
  const input = { close: async () => {}, setMuted: async () => {}, setDevice: async () => {} };
  const output = { close: async () => {}, interrupt: () => { line.cuts += 1; }, setVolume: () => {} };
  return { connection, input, output, playbackEventTarget: null, detach: async () => clearInterval(timer) };
});

function say() {
  for (let at = 0; at < pcm.length; at += PIECE) {
    line.words.push(Buffer.concat([pcm.subarray(at, at + PIECE), Buffer.alloc(PIECE)]).subarray(0, PIECE));
  }
}

function callbacks(seen) {
  return {
    onIncomingEvent: (event) => frames.push(event),
    onMessage: ({ role, message }) => seen[role].push(message),
    onInterruption: () => { seen.interruptions += 1; },
    onAgentResponseCorrection: (event) => seen.corrections.push(event),
    onAgentChatResponsePart: (part) => seen.parts.push(part),
    onError: (message) => seen.errors.push(message),
    onDisconnect: (details) => { seen.end = details; },
  };
}

const nothing = () => ({ agent: [], user: [], parts: [], corrections: [], errors: [], interruptions: 0, end: null });

async function written() {
  const seen = nothing();
  const conversation = await Conversation.startSession({
    agentId: "agent_of_mine", connectionType: "websocket", origin: ws, textOnly: true, ...callbacks(seen),
    overrides: { agent: { prompt: { prompt: "Answer with one word." } } },
  });
  for (let turn = 1; turn <= TURNS; turn++) {
    conversation.sendUserMessage(`Say the number ${turn}.`);
    await until(`answer ${turn}`, () => seen.agent.length >= turn || seen.errors.length);
  }
  await conversation.endSession();
  check(!seen.errors.length && seen.agent.every(Boolean) && seen.end.reason === "user", seen);
  check(seen.parts.map((part) => part.text).join("").replaceAll(" ", "").startsWith(seen.agent[0].replaceAll(" ", "")), seen.parts);
  return `${seen.agent.length} turns in text`;
}

async function spoken() {
  const seen = nothing(), cities = [];
  const { signed_url: signedUrl } = await (
    await fetch(`${url}/v1/convai/conversation/get-signed-url?agent_id=mine`, { headers: { "xi-api-key": "none" } })
  ).json();
  const weather = {
    type: "client", name: "get_weather", description: "Get the weather in a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  };
  const prompt = { prompt: "You help {{name}}. Use your tools.", tools: [weather] };
  const conversation = await Conversation.startSession({
    signedUrl, ...callbacks(seen), dynamicVariables: { name: "Ann" },
    overrides: { agent: { prompt, firstMessage: "Hello {{name}}.", language: "en" }, tts: { voiceId: "21m00Tcm4TlvDq8ikWAM" } },
    clientTools: { get_weather: async ({ city }) => { cities.push(city); return "It rains, 17 degrees."; } },
  });
  await until("the greeting", () => seen.agent.length && line.played);
  await sleep(2000);
  for (let attempt = 0; attempt < 5 && !cities.length; attempt++) {
    const before = seen.agent.length;
    conversation.sendUserMessage("Use the function get_weather for Paris.");
    await until("an answer", () => seen.agent.length > before || cities.length);
  }
  await until("the answer with the weather", () => seen.agent.some((text) => text.includes("17")));
  const answered = seen.agent.length;
  say();
  await until("the words", () => seen.user.some((text) => text.includes("surpassed")));
  await until("the answer", () => seen.agent.length > answered);
  conversation.sendContextualUpdate("The user likes ships.");
  const before = line.played;
  conversation.sendUserMessage("Tell me a long story about a ship and its crew.");
  await until("the story", () => line.played > before + 32_000);
  await sleep(1000);
  const cuts = line.cuts;
  say();
  await until("the interruption", () => line.cuts > cuts && seen.interruptions);
  await until("the correction", () => seen.corrections.some(
    (event) => event.corrected_agent_response.length < event.original_agent_response.length));
  await until("the words", () => seen.user.filter((text) => text.includes("surpassed")).length > 1);
  await conversation.endSession();
  check(!seen.errors.length, seen.errors);
  return `${(line.played / 32_000).toFixed(0)} s of sound, ${line.cuts} interruptions, tool called for ${cities}`;
}

function typed() {
  const short = frames.map((frame) => JSON.stringify(frame, (name, value) => name === "audio_base_64" ? value.slice(0, 8) : value));
  const file = new URL("node_modules/frames.ts", import.meta.url).pathname;
  const head = 'import type { IncomingSocketEvent } from "@elevenlabs/client";\n';
  writeFileSync(file, `${head}export const frames: IncomingSocketEvent[] = [\n${short.join(",\n")}];\n`);
  const tsc = new URL("node_modules/typescript/bin/tsc", import.meta.url).pathname;
  const flags = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022"];
  execFileSync(process.execPath, [tsc, ...flags, file], { stdio: "inherit" });
  return `${frames.length} messages, none refused by the types`;
}

const lines = [];
for (const drive of [written, spoken, typed]) lines.push(await drive());
console.log(`node_elevenlabs: ${lines.join("; ")}`);
process.exit(0);
