// One conversation: what is asked of the server, what it says, and what of it was heard.

import { fromBase64, microphone, Player, RATE, through } from "./audio.js";
import { DuplexTransport, RtcTransport, SocketTransport } from "./transports.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const PAUSE_MS = { server_vad: 500, semantic_vad: 300 };
const STAGES = ["ended", "transcript", "words", "sound", "heard"];

export class Talk {
  constructor(page) {
    this.page = page;
    this.timeline = new Timeline($("timeline"));
    this.transport = null;
    $("talk-start").onclick = () => (this.transport ? this.stop() : this.start());
    $("talk-stop-answer").onclick = () => this.interrupt();
    $("your-turn").onclick = () => {
      this.send("input_audio_buffer.commit");
      this.send("response.create");
    };
    $("type").onsubmit = (event) => {
      event.preventDefault();
      this.write();
    };
    $("loudspeaker").onchange = () =>
      through($("loudspeaker").value, this.element).catch((error) => this.page.fail("talk", error));
    for (const id of ["voice", "turns", "instructions"]) $(id).onchange = () => this.configure();
  }

  async start() {
    this.page.clear("talk");
    $("talk-start").disabled = true;
    let stream = null;
    this.items = new Map(); // by id: {node, said, total_s, heard_s, row}
    this.turn = null;
    this.turns = 0;
    this.playing = null;
    this.began = null;
    try {
      stream = await microphone($("microphone").value, $("listening").value === "speaker");
      await this.page.listDevices();
      const common = {
        key: this.page.key,
        stream,
        onEvent: (e) => this.on(e),
        onClose: (reason) => this.closed(reason),
      };
      if ($("transport").value === "rtc") {
        this.transport = await RtcTransport.open({ ...common, model: "", onTrack: (sound) => this.listen(sound) });
      } else {
        this.player = await Player.open((state) => this.played(state));
        if ($("loudspeaker").value) await through($("loudspeaker").value);
        this.transport = this.duplex
          ? await DuplexTransport.open({ ...common, session: this.session() })
          : await SocketTransport.open({ ...common, path: "v1/realtime" });
      }
      this.began = performance.now();
      if (!this.duplex) this.configure();
      $("times").hidden = false;
      this.timeline.start();
      $("talk-start").textContent = "Stop talking";
      $("talk-start").setAttribute("aria-pressed", "true");
      this.state("Listening");
    } catch (error) {
      this.player?.close();
      this.player = null;
      for (const track of stream?.getTracks() ?? []) track.stop();
      this.page.fail("talk", error);
    }
    $("talk-start").disabled = false;
  }

  stop() {
    const open = this.transport;
    this.transport = null;
    open?.close();
    this.closed("");
  }

  closed(reason) {
    const open = this.transport;
    this.transport = null;
    open?.close();
    this.player?.close();
    this.player = null;
    if (this.element) {
      this.element.srcObject = null;
      this.element = null;
    }
    this.timeline.stop();
    $("talk-start").textContent = "Start talking";
    $("talk-start").setAttribute("aria-pressed", "false");
    $("talk-stop-answer").disabled = true;
    this.state(reason ? `Ended: ${reason}` : "Not connected");
  }

  state(text) {
    $("talk-state").textContent = text;
  }
  send(type, fields = {}) {
    this.transport?.send({ type, ...fields });
  }

  get duplex() {
    return $("transport").value === "duplex";
  }

  configure() {
    $("your-turn").hidden = $("turns").value !== "none";
    this.send("session.update", { session: this.session() });
  }

  session() {
    const turns = $("turns").value;
    const vad = {
      server_vad: { type: "server_vad", silence_duration_ms: 500 },
      semantic_vad: { type: "semantic_vad" },
      none: null,
    };
    const voice = this.page.voices.includes($("voice").value) ? { voice: $("voice").value } : {};
    const locked = [...(this.items?.values() || [])].some((i) => i.total_s);
    const instructions = $("instructions").value;
    if (this.duplex) {
      const detection = turns === "none" ? null : vad[turns];
      return {
        instructions,
        sample_rate_hz: RATE,
        turn_detection: detection,
        ...(locked ? {} : { voice: $("voice").value }),
        extra_body: { auto_response: turns !== "none" },
      };
    }
    return {
      type: "realtime",
      instructions,
      audio: {
        input: { transcription: { model: "default" }, turn_detection: vad[turns] },
        output: { ducking: true, ...(locked ? {} : voice) },
      },
    };
  }

  write() {
    const text = $("typed").value.trim();
    if (!text) return;
    if (!this.transport) {
      this.page.fail("talk", new Error("Press “Start talking” first: what you write belongs to it."));
      return;
    }
    $("typed").value = "";
    this.beginTurn(performance.now());
    this.send("conversation.item.create", {
      item: { type: "message", role: "user", content: [{ type: "input_text", text }] },
    });
    this.send("response.create");
  }

  // --- what the server says ------------------------------------------------------------------------------------------

  on(event) {
    const now = performance.now();
    switch (event.type) {
      case "input_audio_buffer.speech_started":
        this.timeline.begin("you", this.at(event.audio_start_ms, now));
        if (!this.duplex) this.silence();
        this.bubble(event.item_id, "me", "You");
        break;
      case "input_audio_buffer.speech_stopped": {
        const ended = this.at(event.audio_end_ms - (PAUSE_MS[$("turns").value] || 0), now);
        this.timeline.end("you", ended);
        this.beginTurn(ended);
        this.stage("ended", now);
        break;
      }
      case "conversation.item.added":
        if (event.item.type === "message" && event.item.role === "user") {
          const text = event.item.content.map((c) => c.text || c.transcript || "").join(" ");
          if (text) this.say(event.item.id, "me", "You", text, true);
        } else if (event.item.type === "function_call")
          this.say(event.item.id, "them", "Function call", event.item.name, true);
        break;
      case "conversation.item.input_audio_transcription.delta":
        this.say(event.item_id, "me", "You", event.delta);
        break;
      case "conversation.item.input_audio_transcription.completed":
        this.say(event.item_id, "me", "You", event.transcript || "(nothing understood)", true);
        this.stage("transcript", now);
        break;
      case "response.created":
        this.timeline.begin("thinking");
        $("talk-stop-answer").disabled = false;
        this.state("Thinking");
        break;
      case "response.output_audio_transcript.delta":
      case "response.output_text.delta":
        this.say(event.item_id, "them", "Answer", event.delta);
        this.stage("words", now);
        break;
      case "response.output_audio.delta": {
        const pcm = fromBase64(event.delta),
          item = this.items.get(event.item_id);
        if (item) item.total_s += pcm.length / RATE;
        this.stage("sound", now);
        this.timeline.end("thinking");
        this.player?.play(event.item_id, pcm);
        break;
      }
      case "output_audio_buffer.started":
        this.stage("sound", now);
        this.stage("heard", now);
        this.timeline.end("thinking");
        this.timeline.begin("answer");
        this.state("Speaking");
        this.playing = event.response_id;
        $("talk-stop-answer").disabled = false;
        break;
      case "output_audio_buffer.stopped":
      case "output_audio_buffer.cleared":
        this.timeline.end("answer");
        this.state("Listening");
        this.playing = null;
        $("talk-stop-answer").disabled = true;
        if (event.type.endsWith("cleared")) this.timeline.mark("interrupted");
        break;
      case "response.done": {
        this.timeline.end("thinking");
        const { status, status_details: why } = event.response;
        if (status === "failed")
          this.page.fail(
            "talk",
            new Error(`The answer failed: ${why?.error?.code ?? "the server does not say why"}. Ask again.`),
          );
        for (const item of event.response.output) {
          const mine = this.items.get(item.id);
          if (mine) {
            mine.done = true;
            this.show(mine);
          }
        }
        if (!this.playing) {
          $("talk-stop-answer").disabled = true;
          this.state("Listening");
        }
        break;
      }
      case "output_audio_buffer.ducked":
      case "output_audio_buffer.unducked":
        this.player?.hold(event.type.endsWith(".ducked"));
        this.timeline.mark(event.type.endsWith(".ducked") ? "duck" : "unduck");
        break;
      case "turn.event":
        // Somebody speaks over the answer: the voice waits until it is known what for.
        if (event.event === "duck" || event.event === "unduck") {
          this.player?.hold(event.event === "duck");
          this.timeline.mark(event.event);
        }
        break;
      case "overlap.decision":
        if (event.action === "barge_in") this.silence();
        else this.timeline.mark(event.reason);
        break;
      case "session.resumed":
        this.timeline.mark("resumed");
        break;
      case "conversation.item.truncated":
        this.send("conversation.item.retrieve", { item_id: event.item_id });
        break;
      case "conversation.item.retrieved": {
        // What the server remembers of a cut answer is what it takes to have been heard.
        const item = this.items.get(event.item.id);
        if (item) {
          item.kept = event.item.content.map((c) => c.transcript || c.text || "").join(" ");
          this.show(item);
        }
        break;
      }
      case "error":
        if (!["response_cancel_not_active", "playback_ack_too_late"].includes(event.error.code))
          this.page.fail("talk", new Error(event.error.message));
        break;
    }
  }

  /** The page's clock at a time of the session's sound. */
  at(session_ms, now) {
    return this.began === null ? now : Math.min(now, this.began + session_ms);
  }

  // --- hearing -------------------------------------------------------------------------------------------------------

  listen(sound) {
    this.element = new Audio();
    this.element.autoplay = true;
    this.element.srcObject = sound;
    if ($("loudspeaker").value)
      through($("loudspeaker").value, this.element).catch((error) => this.page.fail("talk", error));
    this.element.play().catch((error) => this.page.fail("talk", error));
  }

  played({ sounding, item: id, heard }) {
    const item = this.items.get(sounding ? id : this.playing);
    if (sounding) {
      if (!this.playing) {
        this.timeline.begin("answer");
        this.stage("heard", performance.now());
        this.state("Speaking");
        $("talk-stop-answer").disabled = false;
      }
      this.playing = id;
      if (item) item.heard_s = heard;
      if (this.duplex) this.acknowledge(id, heard);
    } else if (this.playing) {
      if (item?.done) {
        item.heard_s = item.total_s;
        $("talk-stop-answer").disabled = true;
        if (this.duplex) this.acknowledge(this.playing, item.total_s, true);
      }
      this.playing = null;
      this.timeline.end("answer");
      this.state("Listening");
    }
    if (item) this.show(item);
  }

  /** The user speaks, or asks for silence: stop what sounds, and tell the server how much of it was heard. */
  async silence() {
    // What waits is dropped too, and a voice that was held is held no more.
    if (!this.playing) {
      this.player?.flush();
      return;
    }
    if (!this.player) return;
    const id = this.playing;
    this.timeline.mark("interrupted");
    const heard = await this.player.flush();
    if (heard[id] === undefined) return;
    if (this.duplex) this.acknowledge(id, heard[id] / RATE, true);
    else
      this.send("conversation.item.truncate", {
        item_id: id,
        content_index: 0,
        audio_end_ms: Math.round((heard[id] / RATE) * 1000),
      });
  }

  /** By the audio clock: so much of it was heard. Five times a second is often enough. */
  acknowledge(id, heard_s, now = false) {
    if (!now && heard_s - (this.acked ?? 0) < 0.2 && heard_s >= (this.acked ?? 0)) return;
    this.acked = heard_s;
    this.send("playback.ack", { item_id: id, played_ms: Math.round(heard_s * 1000) });
  }

  interrupt() {
    this.send("response.cancel");
    if (this.transport?.sound === "browser") this.send("output_audio_buffer.clear");
    this.silence();
  }

  // --- what is shown -------------------------------------------------------------------------------------------------

  bubble(id, who, name) {
    if (!this.items.has(id)) {
      const node = document.createElement("p");
      node.className = who;
      node.dataset.item = id;
      const head = document.createElement("b");
      head.textContent = name;
      node.append(head, document.createElement("span"), document.createElement("span"), document.createElement("span"));
      $("talk-log").append(node);
      this.items.set(id, { node, who, said: "", total_s: 0, heard_s: 0, kept: null, done: false });
    }
    return this.items.get(id);
  }

  say(id, who, name, text, whole = false) {
    const item = this.bubble(id, who, name);
    item.said = whole ? text : item.said + text;
    this.show(item);
  }

  show(item) {
    const [, heard, unheard, cut] = item.node.children,
      { said } = item;
    let end = said.length;
    if (item.kept !== null) end = Math.min(end, item.kept.length);
    else if (item.who === "them" && item.total_s)
      end = Math.round(said.length * Math.min(1, item.heard_s / item.total_s));
    heard.textContent = said.slice(0, end);
    unheard.className = "unheard";
    unheard.textContent = item.kept === null ? said.slice(end) : "";
    cut.className = "cut";
    cut.textContent = item.kept === null ? "" : said.slice(end);
    $("talk-log").scrollTop = $("talk-log").scrollHeight;
  }

  beginTurn(ended) {
    const row = document.createElement("tr");
    row.append(...["turn", ...STAGES, "connection"].map(() => document.createElement("td")));
    row.children[0].textContent = ++this.turns;
    row.children[6].textContent = $("transport").selectedOptions[0].textContent;
    $("stages").tBodies[0].prepend(row);
    this.turn = { ended, row, seen: new Set() };
  }

  stage(name, now) {
    if (!this.turn || this.turn.seen.has(name)) return;
    this.turn.seen.add(name);
    this.turn.row.children[1 + STAGES.indexOf(name)].textContent = Math.round(now - this.turn.ended);
  }
}
