// @openai/agents-realtime: a spoken turn answered in sound, an interruption, a tool that must be called. drive.mjs URL RECORDING.wav
import { readFileSync } from "node:fs";
import { hostedMcpTool } from "@openai/agents-core";
import { RealtimeAgent, RealtimeSession, tool } from "@openai/agents-realtime";
import { z } from "zod";

const [url, recording] = process.argv.slice(2);
const STEP = 4800; // 0.1 s of PCM16 at 24 kHz
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const called = [];
const weather = tool({
  name: "get_weather",
  description: "The weather in a city.",
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => { called.push(city); return "sunny"; },
});

async function until(what, condition, seconds = 60) {
  for (let k = 0; k < seconds * 20; k++) {
    if (condition()) return;
    await sleep(50);
  }
  throw new Error(`never: ${what}`);
}

async function open(settings, tools = []) {
  const agent = new RealtimeAgent({ name: "a", instructions: "You are terse.", tools });
  const session = new RealtimeSession(agent, { transport: "websocket", model: "gpt-realtime", config: settings });
  const seen = { sound: 0, interrupted: 0, heard: "", errors: [] };
  session.on("audio", (event) => { seen.sound += event.data.byteLength; });
  session.on("audio_interrupted", () => { seen.interrupted++; });
  session.on("error", (event) => { seen.errors.push(JSON.stringify(event.error?.error ?? event.error)); });
  session.on("transport_event", (event) => {
    if (event.type === "conversation.item.input_audio_transcription.completed") seen.heard += event.transcript;
    if (event.type === "input_audio_buffer.speech_started") seen.speech = true;
  });
  await session.connect({ apiKey: "none", url: `${url.replace("http", "ws")}/v1/realtime?model=gpt-realtime` });
  return [session, seen];
}

/** Sound in real time, then silence. */
async function say(session, wav, silence_s) {
  const pcm = Buffer.concat([wav, Buffer.alloc(48000 * silence_s)]);
  for (let at = 0; at < pcm.length; at += STEP) {
    session.sendAudio(new Uint8Array(pcm.subarray(at, at + STEP)).buffer);
    await sleep(100);
  }
}

const wav = readFileSync(recording).subarray(44);
const vad = { type: "server_vad", silence_duration_ms: 500, interrupt_response: true, create_response: true };
const [session, seen] = await open({ audio: { input: { transcription: { model: "default" }, turnDetection: vad } } });
await say(session, wav, 1.5);
await until("a spoken answer", () => seen.sound > 12_000);
await until("what was heard", () => seen.heard.includes("surpassed"));
session.sendMessage("Count slowly from one to one hundred, in words.");
const before = seen.sound;
await until("a long answer", () => seen.sound > before + 48_000);
await say(session, wav, 1);
await until("an interruption", () => seen.interrupted > 0);
if (seen.errors.length) throw new Error(seen.errors.join());
session.close();

const [asked, reported] = await open({ toolChoice: "required", outputModalities: ["text"] }, [weather]);
asked.sendMessage("What is the weather in Paris?");
await until("a call", () => called.length > 0);
asked.close();

/** A tool server that the client names. Its calls have to be approved. */
async function withServer(approve) {
  const server = hostedMcpTool({
    serverLabel: "theirs", serverUrl: process.env.MCP_URL, allowedTools: ["delete"], requireApproval: "always",
  });
  const [talk, reports] = await open({ toolChoice: "required", outputModalities: ["text"] }, [server]);
  const events = [];
  let completed = 0, listed = 0;
  talk.on("transport_event", (event) => events.push(event.type));
  talk.on("mcp_tools_changed", (tools) => { listed = tools.length; });
  talk.on("mcp_tool_call_completed", () => { completed++; });
  talk.on("tool_approval_requested", (_context, _agent, request) => {
    void (approve ? talk.approve(request.approvalItem) : talk.reject(request.approvalItem));
  });
  await until("the tools of the server", () => listed === 1);
  talk.sendMessage("Delete the word hello.");
  await until("an answer after the approval", () => events.filter((type) => type === "response.done").length > 1);
  if (completed !== Number(approve)) throw new Error(`${completed} calls, ${events}`);
  if (reports.errors.length) throw new Error(reports.errors.join());
  talk.close();
}
if (process.env.MCP_URL) {
  await withServer(true);
  await withServer(false);
}
console.log(`@openai/agents-realtime: ${(seen.sound / 48000).toFixed(1)} s of sound, interrupted, called with ${JSON.stringify(called[0])}`);
process.exit(reported.errors.length ? 1 : 0);
