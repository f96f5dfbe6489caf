// Two ways to one session: events in, events out. `sound` says who plays the answer: this page (WebSocket) or the browser (WebRTC).

import { capture, toBase64 } from "./audio.js";

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
    const socket = (me.socket = new WebSocket(socketUrl(path), protocols(key)));
    await new Promise((resolve, reject) => {
      socket.onopen = resolve;
      socket.onerror = () => reject(new Error("The server did not accept the connection: is the key right, is it ready?"));
    });
    socket.onmessage = ({ data }) => onEvent(JSON.parse(data));
    socket.onclose = ({ reason }) => { me.stop?.(); onClose(reason); };
    socket.onerror = null;
    if (stream) me.stop = await capture(stream, (pcm) => me.send({ type: "input_audio_buffer.append", audio: toBase64(pcm) }));
    return me;
  }
  send(event) { if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(event)); }
  close() { this.stop?.(); this.socket.close(); }
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
      headers: { "Content-Type": "application/sdp", ...(key ? { Authorization: `Bearer ${key}` } : {}) },
      body: peer.localDescription.sdp,
    });
    if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
    await peer.setRemoteDescription({ type: "answer", sdp: await answer.text() });
    await new Promise((resolve, reject) => {
      if (channel.readyState === "open") resolve();
      channel.onopen = resolve;
      me.failed = () => reject(new Error("No way to the server was found: WebRTC needs UDP between the two."));
    });
    me.failed = null;
    return me;
  }
  send(event) { if (this.channel.readyState === "open") this.channel.send(JSON.stringify(event)); }
  close() { for (const t of this.stream.getTracks()) t.stop(); this.channel.onclose = null; this.peer.close(); }
}
