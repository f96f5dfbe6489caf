// Ways to one session: events in, events out. `sound` says who plays the answer: this page (WebSocket) or the
// browser (WebRTC).

import { capture, toBase64 } from "./audio.js";
import { failed, openSocket, withKey } from "./errors.js";

export function socketUrl(path) {
  const url = new URL(path, location.href);
  url.protocol = url.protocol.replace("http", "ws");
  return url;
}

export function protocols(key) {
  return key ? ["realtime", `openai-insecure-api-key.${key}`] : ["realtime"];
}

/** Both transports: send(event), close(), onEvent, onClose(reason). */
export class SocketTransport {
  sound = "page";
  static async open({ path, key, stream, onEvent, onClose }) {
    const me = new SocketTransport();
    const socket = (me.socket = await openSocket(socketUrl(path), protocols(key), key));
    socket.onmessage = ({ data }) => onEvent(JSON.parse(data));
    socket.onclose = ({ reason }) => {
      me.stop?.();
      onClose(reason);
    };
    if (stream)
      me.stop = await capture(stream, (pcm) => me.send({ type: "input_audio_buffer.append", audio: toBase64(pcm) }));
    return me;
  }
  send(event) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(event));
  }
  close() {
    this.stop?.();
    this.socket.close();
  }
}

// How many sent events are kept for a server that may not have had them: 40 s of sound.
const KEPT = 2000,
  RETRIES = 7;

/** A full-duplex session outlives its socket: what the server did not take is sent again; what was missed comes. */
export class DuplexTransport {
  sound = "page";
  static async open({ key, stream, session, onEvent, onClose }) {
    const me = Object.assign(new DuplexTransport(), { key, onEvent, onClose, seq: 0, sent: [], first: 0, open: true });
    await me.connect();
    me.send({ type: "session.update", session });
    me.stop = await capture(stream, (pcm) => me.send({ type: "input_audio_buffer.append", audio: toBase64(pcm) }));
    return me;
  }
  async connect(resume) {
    const socket = await openSocket(socketUrl("v1/realtime?duplex=1"), protocols(this.key), this.key);
    this.socket = socket;
    this.live = !resume;
    socket.onmessage = ({ data }) => this.take(JSON.parse(data));
    socket.onclose = ({ code, reason }) => this.lost(code, reason);
    if (resume) socket.send(JSON.stringify(resume));
  }
  take(event) {
    if (event.type === "session.created" || event.type === "session.resumed") {
      this.id = event.session_id;
      this.token = event.resume_token;
    }
    if (event.type === "session.resumed") {
      this.live = true;
      for (const text of this.sent.slice(
        Math.max(0, (event.received_events ?? this.first + this.sent.length) - this.first),
      ))
        this.socket.send(text);
    }
    if (event.type === "session.resync_required" || (event.type === "error" && !this.live)) this.open = false;
    if (event.server_event_seq) {
      this.seq = event.server_event_seq;
      if (this.seq % 20 === 0)
        this.socket.send(JSON.stringify({ type: "session.event_ack", server_event_seq: this.seq }));
    }
    this.onEvent(event);
  }
  async lost(code, reason) {
    if (this.closing) return;
    if (!this.open || !this.token || code === 1000) {
      this.stop?.();
      this.onClose(this.open ? reason : "the session could not be resumed");
      return;
    }
    this.live = false;
    for (let k = 0; k < RETRIES; k++) {
      await new Promise((resolve) => setTimeout(resolve, 250 * 2 ** k));
      if (this.closing) return;
      try {
        await this.connect({
          type: "session.resume",
          session_id: this.id,
          resume_token: this.token,
          last_received_server_event_seq: this.seq,
        });
        if (this.closing) this.close();
        return;
      } catch {
        /* it is not back yet */
      }
    }
    this.stop?.();
    this.onClose("the connection was lost");
  }
  send(event) {
    const text = JSON.stringify(event);
    this.sent.push(text);
    if (this.sent.length > KEPT) {
      this.sent.shift();
      this.first++;
    }
    if (this.live && this.socket.readyState === WebSocket.OPEN) this.socket.send(text);
  }
  close() {
    this.closing = true;
    this.stop?.();
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send('{"type":"session.close"}');
    this.socket.close();
  }
}

export class RtcTransport {
  sound = "browser";
  static async open({ model, key, stream, onEvent, onClose, onTrack }) {
    const me = new RtcTransport();
    const peer = (me.peer = new RTCPeerConnection());
    me.stream = stream;
    for (const track of stream.getTracks()) peer.addTrack(track, stream);
    peer.ontrack = ({ streams }) => onTrack(streams[0]);
    const channel = (me.channel = peer.createDataChannel("oai-events"));
    channel.onmessage = ({ data }) => onEvent(JSON.parse(data));
    channel.onclose = () => onClose("");
    peer.onconnectionstatechange = () => {
      if (peer.connectionState === "failed" && me.failed) me.failed();
      else if (["failed", "closed"].includes(peer.connectionState)) onClose(peer.connectionState);
    };
    await peer.setLocalDescription(await peer.createOffer());
    const answer = await fetch(`v1/realtime/calls?model=${encodeURIComponent(model)}`, {
      method: "POST",
      headers: withKey(key, { "Content-Type": "application/sdp" }),
      body: peer.localDescription.sdp,
    });
    if (!answer.ok) throw await failed(answer, key);
    await peer.setRemoteDescription({ type: "answer", sdp: await answer.text() });
    await new Promise((resolve, reject) => {
      if (channel.readyState === "open") resolve();
      channel.onopen = resolve;
      me.failed = () =>
        reject(
          new Error(
            "No way to the server was found: WebRTC needs UDP. Choose WebSocket as the connection in the options.",
          ),
        );
    });
    me.failed = null;
    return me;
  }
  send(event) {
    if (this.channel.readyState === "open") this.channel.send(JSON.stringify(event));
  }
  close() {
    for (const t of this.stream.getTracks()) t.stop();
    this.channel.onclose = null;
    this.peer.close();
  }
}
