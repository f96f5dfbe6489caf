// @ts-check
// Transports of a session's events. This code plays the audio of a WebSocket; the browser plays the audio of WebRTC.

import { capture, release, toBase64 } from "./audio.js";
import { failed } from "./errors.js";

/** @typedef {Record<string, any>} Message an event of the protocol (docs/wire/openai-realtime.md) */
/**
 * @typedef {object} Listening
 * @property {MediaStream | null} stream the microphone; it is stopped with the transport
 * @property {(event: Message) => void} onEvent
 * @property {(reason: string, lost: boolean) => void} onClose called once, unless `close` was called; `lost`: the
 *   connection broke, and the server has not ended it
 */
/**
 * @typedef {object} Transport
 * @property {(event: Message) => void} send
 * @property {() => void} close
 */

const LOST = "the connection was lost";
// A browser gives a call up half a minute after its server is gone. It is in doubt after a few seconds.
const DOUBT_MS = 1000;

/** @param {Transport} transport */
const sendsSound = (transport) => (/** @type {ArrayBuffer} */ pcm) =>
  transport.send({ type: "input_audio_buffer.append", audio: toBase64(pcm) });

/** The end of a transport. It is reported once: as the error of opening, if the transport is not open yet. */
class Ending {
  /** @param {Listening["onClose"]} onClose */
  constructor(onClose) {
    this.onClose = onClose;
    this.isOpen = this.isOver = false;
    /** @type {(error: Error) => void} */
    this.reject = () => {};
    /** @type {Promise<never>} rejects if the transport ends before it is open */
    this.early = new Promise((_, reject) => (this.reject = reject));
    this.early.catch(() => {});
  }
  /** @param {string} reason */
  tell(reason, lost = false) {
    if (this.isOver) return;
    this.isOver = true;
    if (this.isOpen) this.onClose(reason, lost);
    else this.reject(new Error(`The connection ended before it began${reason && `: ${reason}`}.`));
  }
  /**
   * Do the last step of opening. If it fails, or the transport ends meanwhile, close everything.
   * @template {Transport} T
   * @param {T} transport
   * @param {Promise<void>} step
   */
  async opened(transport, step) {
    try {
      await Promise.race([step, this.early]);
    } catch (error) {
      transport.close();
      // Close again if the step completes later, to release the microphone.
      step.then(
        () => transport.close(),
        () => {},
      );
      throw error;
    }
    this.isOpen = true;
    return transport;
  }
}

/** @implements {Transport} */
export class SocketTransport {
  /** @param {WebSocket} socket */
  constructor(socket) {
    this.socket = socket;
    this.given = 0;
    this.stop = () => {};
  }
  /** The number of bytes that wait to be sent. */
  get waits() {
    return this.socket.bufferedAmount;
  }
  /** The number of bytes that have left the browser. */
  get delivered() {
    return this.given - this.waits;
  }
  /** @param {Listening & {server: import("./server.js").Server, path: string}} options */
  static async open({ server, path, stream, onEvent, onClose }) {
    const me = new SocketTransport(await server.open(path)),
      ending = new Ending(onClose);
    me.socket.onmessage = ({ data }) => onEvent(JSON.parse(data));
    me.socket.onclose = ({ reason, wasClean }) => {
      me.stop();
      ending.tell(reason || (wasClean ? "the server has closed it" : LOST));
    };
    const listen = async () => {
      if (stream) me.stop = await capture(stream, sendsSound(me));
    };
    return ending.opened(me, listen());
  }
  /** @param {Message} event */
  send(event) {
    if (this.socket.readyState !== WebSocket.OPEN) return;
    const text = JSON.stringify(event);
    this.given += text.length;
    this.socket.send(text);
  }
  close() {
    this.stop();
    this.socket.onclose = null;
    this.socket.close();
  }
}

// The number of sent events that are kept in case the server has not received them: 40 s of audio.
const KEPT = 2000,
  RETRIES = 7;

/**
 * A full-duplex session, which outlives its socket: both sides send again what the other one missed.
 * @implements {Transport}
 */
export class DuplexTransport {
  /** @param {Listening & {server: import("./server.js").Server}} options */
  constructor({ server, onEvent, onClose }) {
    this.server = server;
    this.onEvent = onEvent;
    this.onClose = onClose;
    this.seq = this.first = 0;
    /** @type {string[]} */
    this.sent = [];
    this.resumable = true;
    this.live = this.closing = this.resuming = false;
    /** Called when the server has answered a request to resume. */
    this.answered = () => {};
    this.id = this.token = "";
    this.stop = () => {};
    /** @type {WebSocket | null} */
    this.socket = null;
  }
  /** @param {Listening & {server: import("./server.js").Server, session: Message}} options */
  static async open(options) {
    const ending = new Ending(options.onClose),
      me = new DuplexTransport({ ...options, onClose: (reason) => ending.tell(reason) });
    await me.connect();
    me.send({ type: "session.update", session: options.session });
    const listen = async () => {
      if (options.stream) me.stop = await capture(options.stream, sendsSound(me));
    };
    return ending.opened(me, listen());
  }
  /** @param {Message} [resume] */
  async connect(resume) {
    const socket = await this.server.open("v1/realtime?duplex=1");
    this.socket = socket;
    this.live = !resume;
    socket.onmessage = ({ data }) => this.take(JSON.parse(data), socket);
    socket.onclose = ({ code, reason }) => {
      if (socket === this.socket) this.lost(code, reason);
    };
    if (resume) socket.send(JSON.stringify(resume));
  }
  /**
   * @param {Message} event
   * @param {WebSocket} socket
   */
  take(event, socket) {
    if (event.type === "session.created" || event.type === "session.resumed") {
      this.id = event.session_id;
      this.token = event.resume_token;
    }
    if (event.type === "session.resumed") {
      this.live = true;
      const taken = event.received_events ?? this.first + this.sent.length;
      for (const text of this.sent.slice(Math.max(0, taken - this.first))) socket.send(text);
      this.answered();
    }
    // If the dead host still counts as alive, the request is retried.
    if (event.type === "session.resync_required" || (event.type === "error" && !this.live)) {
      this.resumable = Boolean(event.error?.retryable);
      this.answered();
    }
    if (event.server_event_seq) {
      this.seq = event.server_event_seq;
      if (this.seq % 20 === 0)
        socket.send(JSON.stringify({ type: "session.event_ack", server_event_seq: this.seq }));
    }
    if (event.type !== "error" || this.live) this.onEvent(event);
  }
  /**
   * @param {number} code
   * @param {string} reason
   */
  async lost(code, reason) {
    this.live = false;
    this.answered();
    if (this.closing || this.resuming) return;
    if (!this.token || code === 1000) {
      this.over(reason || "the server has closed it");
      return;
    }
    this.resuming = true;
    for (let k = 0; k < RETRIES && this.resumable; k++) {
      await new Promise((resolve) => setTimeout(resolve, 250 * 2 ** k));
      if (this.closing) return;
      /** @type {Promise<void>} */
      const answered = new Promise((resolve) => (this.answered = resolve));
      try {
        await this.connect({
          type: "session.resume",
          session_id: this.id,
          resume_token: this.token,
          last_received_server_event_seq: this.seq,
        });
        await answered;
      } catch {
        continue; // the server is not back yet
      }
      if (this.closing) this.close();
      if (this.closing || this.live) {
        this.resuming = false;
        return;
      }
      const refused = this.socket;
      this.socket = null;
      refused?.close();
    }
    this.over(this.resumable ? LOST : "the session could not be resumed");
  }
  /** @param {string} reason */
  over(reason) {
    this.closing = true;
    this.stop();
    this.onClose(reason, false);
  }
  /** @param {Message} event */
  send(event) {
    const text = JSON.stringify(event);
    this.sent.push(text);
    if (this.sent.length > KEPT) {
      this.sent.shift();
      this.first++;
    }
    if (this.live && this.socket?.readyState === WebSocket.OPEN) this.socket.send(text);
  }
  close() {
    this.closing = true;
    this.stop();
    if (this.socket?.readyState === WebSocket.OPEN) this.socket.send('{"type":"session.close"}');
    this.socket?.close();
  }
}

/** @implements {Transport} */
export class RtcTransport {
  /**
   * @param {RTCPeerConnection} peer
   * @param {MediaStream | null} stream
   */
  constructor(peer, stream) {
    this.peer = peer;
    this.stream = stream;
    this.channel = peer.createDataChannel("oai-events");
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.doubt = undefined;
  }
  /** @param {Listening & {server: import("./server.js").Server, onTrack: (sound: MediaStream) => void}} options */
  static async open({ server, stream, onEvent, onClose, onTrack }) {
    const me = new RtcTransport(new RTCPeerConnection(), stream),
      ending = new Ending(onClose),
      { peer, channel } = me;
    for (const track of stream?.getTracks() ?? []) peer.addTrack(track, /** @type {MediaStream} */ (stream));
    peer.ontrack = ({ streams }) => onTrack(streams[0]);
    channel.onmessage = ({ data }) => onEvent(JSON.parse(data));
    channel.onclose = () => ending.tell("the server has hung up");
    const lost = () =>
      ending.tell(
        ending.isOpen ? LOST : "no way to the server was found. WebRTC needs UDP: choose a WebSocket instead",
        true,
      );
    peer.onconnectionstatechange = () => {
      clearTimeout(me.doubt);
      if (peer.connectionState === "failed") lost();
      else if (peer.connectionState === "disconnected") me.doubt = setTimeout(lost, DOUBT_MS);
    };
    const connect = async () => {
      await peer.setLocalDescription(await peer.createOffer());
      const answer = await server.fetch("v1/realtime/calls", {
        method: "POST",
        headers: { "Content-Type": "application/sdp" },
        body: peer.localDescription?.sdp,
      });
      if (!answer.ok) throw await failed(answer, server.key);
      await peer.setRemoteDescription({ type: "answer", sdp: await answer.text() });
      await new Promise((resolve) => {
        if (channel.readyState === "open") resolve(null);
        channel.onopen = resolve;
      });
    };
    return ending.opened(me, connect());
  }
  /** @param {Message} event */
  send(event) {
    if (this.channel.readyState === "open") this.channel.send(JSON.stringify(event));
  }
  close() {
    clearTimeout(this.doubt);
    release(this.stream);
    this.channel.onclose = this.peer.onconnectionstatechange = null;
    this.peer.close();
  }
}
