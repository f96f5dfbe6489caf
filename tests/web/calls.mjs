// A conversation of the browser's client over a call, in Node, with a real server:
// `node calls.mjs MODULE URL < steps.json`.
//
// Each event of the conversation is a line of JSON on standard output. A step waits for the event that it names.

import { readFileSync } from "node:fs";
import { peers, pretend, pretendCalls, refused, tracks } from "./browser.mjs";

const [module, url] = process.argv.slice(2),
  steps = JSON.parse(readFileSync(0, "utf8"));
pretend(url);
pretendCalls(url);
const { Conversation } = await import(module);
const reported = [];
let heard = () => {};
/** Wait for an event of this kind, with these fields, since the last such wait. */
async function until(kind, fields) {
  const is = ([found, detail]) =>
    found === kind && Object.entries(fields).every(([name, value]) => detail?.[name] === value);
  while (!reported.some(is)) await new Promise((resolve) => (heard = resolve));
  reported.splice(0, reported.findIndex(is) + 1);
}

const tools = {
  add: { description: "", parameters: { type: "object" }, run: ({ a, b }) => a + b },
};
const talk = new Conversation({ server: url, key: () => "none", transport: "webrtc", turns: "manual", tools });
for (const kind of ["words", "state", "mark"])
  talk.on(kind, (detail) => {
    reported.push([kind, detail]);
    console.log(JSON.stringify([kind, detail]));
    heard();
  });
talk.on("error", (error) => console.log(JSON.stringify(["error", { message: error.message, code: error.code }])));

const acts = {
  start: () => talk.start(),
  write: (text) => talk.write(text),
  writes: (text) => void talk.write(text),
  until,
  vanish: () => peers.at(-1).vanish(),
  die: (state) => peers.at(-1).die(state),
  become: (state) => peers.at(-1).become(state),
  refuse: (next, status) => Object.assign(refused, { next, status }),
  hangUp: () => peers.at(-1).channel.onclose(),
  stop: () => talk.stop(),
  wait: (ms) => new Promise((resolve) => setTimeout(resolve, ms)),
};
for (const [act, ...given] of steps) await acts[act](...given);
const done = { open: talk.open, calls: peers.length };
talk.stop();
console.log(JSON.stringify(["done", { ...done, stopped: tracks.every((track) => track.stopped) }]));
process.exit(0);
