// The captions of the browser's client in Node, with a real server: `node captions.mjs MODULE URL < steps.json`.
//
// Node has no microphone, so this one hears what the steps say. Each event of the captions is a line of JSON on
// standard output. A step waits for the event that it names.

import { readFileSync } from "node:fs";
import { microphones, pretend, tracks } from "./browser.mjs";

const [module, url] = process.argv.slice(2),
  steps = JSON.parse(readFileSync(0, "utf8"));
pretend(url);
const { Captions } = await import(module);
const reported = [];
let heard = () => {};
const print = (kind, detail) => {
  reported.push([kind, detail]);
  console.log(JSON.stringify([kind, detail]));
  heard();
};
/** Wait for an event of this kind, with these fields, since the last such wait. */
async function until(kind, fields) {
  const is = ([found, detail]) =>
    found === kind && Object.entries(fields).every(([name, value]) => detail?.[name] === value);
  while (!reported.some(is)) await new Promise((resolve) => (heard = resolve));
  reported.splice(0, reported.findIndex(is) + 1);
}

const options = { server: url, key: () => "none" };
const captions = new Captions(options);
for (const kind of ["line", "state", "lost", "end"]) captions.on(kind, (detail) => print(kind, detail));
captions.on("error", (error) => print("error", { message: error.message, code: error.code }));

const PIECE = 960;
const acts = {
  start: () => captions.start().catch((error) => print("refused", { name: error.name, message: error.message })),
  begin: () => void acts.start(),
  configure: (given) => captions.configure(given),
  options: (given) => void Object.assign(captions.options, given),
  hear: (sound) => {
    const bytes = Buffer.from(sound, "base64");
    for (let at = 0; at < bytes.length; at += PIECE) {
      const { buffer } = new Uint8Array(bytes.subarray(at, at + PIECE));
      microphones.at(-1).onmessage?.({ data: buffer });
    }
  },
  until,
  cut: () => captions.run.transport.socket.close(),
  unplug: () => void tracks.at(-1).onended(),
  stop: () => captions.stop(),
  stops: () => Promise.all([captions.stop(), captions.stop()]),
  leave: () => void captions.stop(),
  key: (key) => (captions.server.give = () => key),
  at: (server) => (captions.server.root = new URL(server)),
};
for (const [act, ...given] of steps) await acts[act](...given);
print("done", { open: captions.open, stopped: tracks.length > 0 && tracks.every((track) => track.stopped) });
process.exit(0);
