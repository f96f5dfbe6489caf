// The conversation tab: its lines, the times of each turn, and both waveforms.

import { Conversation } from "./client/antiphon.js";
import { inWords, keptInView } from "./log.js";
import { Stages } from "./stages.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const NAMES = { user: "You", assistant: "Answer", tool: "Function call" };
const STATES = { listening: "Listening", thinking: "Thinking", speaking: "Speaking" };

export class Talk {
  constructor(page) {
    this.page = page;
    this.timeline = new Timeline($("timeline"));
    this.stages = new Stages($("tiles"), $("stages"));
    this.conversation = null;
    this.nodes = new Map(); // by item
    $("talk-start").onclick = () => (this.conversation?.open ? this.conversation.stop() : this.start());
    $("talk-stop-answer").onclick = () => this.conversation.interrupt();
    $("your-turn").onclick = () => this.conversation?.endTurn();
    $("type").onsubmit = (event) => {
      event.preventDefault();
      this.write();
    };
    for (const id of ["voice", "turns", "instructions", "loudspeaker"]) $(id).onchange = () => this.configure();
    this.configure();
  }

  options() {
    const voice = $("voice").value;
    return {
      instructions: $("instructions").value,
      turns: $("turns").value,
      loudspeaker: $("loudspeaker").value,
      ...(this.page.voices.includes(voice) ? { voice } : {}),
    };
  }

  configure() {
    $("your-turn").hidden = $("turns").value !== "manual";
    if (this.conversation?.open) this.conversation.configure(this.options());
  }

  async start() {
    this.page.clear("talk");
    $("talk-start").disabled = true;
    const transport = $("transport"),
      conversation = new Conversation({
        key: this.page.key,
        transport: transport.value,
        microphone: $("microphone").value,
        headphones: $("listening").value === "headphones",
        ...this.options(),
      });
    this.conversation = conversation;
    this.stages.begin(transport.selectedOptions[0].textContent);
    conversation.on("state", (detail) => this.state(detail));
    conversation.on("words", (line) => this.show(line));
    conversation.on("stage", (detail) => this.stages.take(detail));
    conversation.on("span", ({ lane, begins, at }) => this.timeline[begins ? "begin" : "end"](lane, at));
    conversation.on("mark", ({ text, at }) => this.timeline.mark(text, at));
    conversation.on("error", (error) => this.page.fail("talk", error));
    try {
      await conversation.start();
      await this.page.listDevices();
      $("times").hidden = false;
      this.timeline.start(() => conversation.levels);
      $("talk-start").textContent = "Stop talking";
      $("talk-start").setAttribute("aria-pressed", "true");
    } catch (error) {
      if (error.name !== "AbortError") this.page.fail("talk", error);
    }
    $("talk-start").disabled = false;
  }

  state({ state, reason }) {
    $("talk-stop-answer").disabled = !["thinking", "speaking"].includes(state);
    if (state !== "ended") {
      $("talk-state").textContent = STATES[state];
      return;
    }
    this.timeline.stop();
    $("talk-start").textContent = "Start talking";
    $("talk-start").setAttribute("aria-pressed", "false");
    $("talk-state").textContent = reason ? `Ended: ${inWords(reason)}` : "Not connected";
    if (reason) this.page.lost("talk", `Press “Start talking” to begin again.`, reason);
  }

  write() {
    const text = $("typed").value.trim();
    if (!text) return;
    if (!this.conversation?.open) {
      this.page.fail("talk", new Error("Press “Start talking” first: writing needs an open conversation."));
      return;
    }
    $("typed").value = "";
    this.conversation.write(text);
  }

  /** Show a line in three parts: heard, not heard yet, and cut off before it was heard. */
  show({ id, who, text, heard, cut, final }) {
    let node = this.nodes.get(id);
    if (!node) {
      node = document.createElement("p");
      node.className = who === "user" ? "me" : "them";
      const head = document.createElement("b");
      head.textContent = NAMES[who];
      node.append(head, ...["heard", "unheard", "cut"].map((name) => span(name)));
      keptInView($("talk-log"), () => $("talk-log").append(node));
      this.nodes.set(id, node);
    }
    const said = who === "user" && final && !text ? "(nothing understood)" : text.slice(0, heard),
      rest = text.slice(heard);
    keptInView($("talk-log"), () => {
      // This runs twenty times a second. Update only parts that changed, so that screen readers announce only those.
      [said, cut ? "" : rest, cut ? rest : ""].forEach((part, k) => {
        const place = node.children[k + 1];
        if (place.textContent !== part) place.textContent = part;
      });
    });
  }
}

function span(name) {
  const node = document.createElement("span");
  node.className = name;
  return node;
}
