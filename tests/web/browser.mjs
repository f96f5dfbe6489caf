// What a browser has and Node has not: a microphone that hears what a test says, and calls that a WebSocket carries.

export const microphones = [];

class Track {
  onended = null;
  stopped = false;
  stop() {
    this.stopped = true;
  }
}
/** Every track of the microphone, the first of which is its own; the others are copies. */
export const tracks = [];
function stream() {
  const track = new Track();
  tracks.push(track);
  return { getTracks: () => [track], getAudioTracks: () => [track], clone: stream };
}

/** Replace the globals that the client uses. `url` is the page's. */
export function pretend(url) {
  globalThis.location = new URL(url);
  globalThis.AudioContext = class {
    audioWorklet = { addModule: async () => {} };
    async resume() {}
    createMediaStreamSource() {
      return { context: this, connect() {}, disconnect() {} };
    }
  };
  globalThis.AnalyserNode = class {
    fftSize = 2048;
    getFloatTimeDomainData() {}
  };
  globalThis.AudioWorkletNode = class {
    constructor() {
      this.port = { onmessage: null, postMessage() {} };
      microphones.push(this.port);
    }
  };
  const mediaDevices = { getUserMedia: async () => stream() };
  Object.defineProperty(globalThis, "navigator", { value: { mediaDevices } });
}

/** The calls that were begun. Each is a RTCPeerConnection whose data channel is a WebSocket to the server. */
export const peers = [];

/** Let calls begin, except the next `refused.next` ones. */
export const refused = { next: 0, status: 0 };

export function pretendCalls(url) {
  const real = globalThis.fetch;
  globalThis.fetch = async (target, init) => {
    if (!String(target).endsWith("v1/realtime/calls")) return real(target, init);
    if (refused.next-- <= 0) return new Response("answer", { status: 201 });
    if (!refused.status) throw new TypeError("fetch failed");
    return new Response("{}", { status: refused.status });
  };
  globalThis.RTCPeerConnection = class {
    connectionState = "new";
    localDescription = null;
    constructor() {
      peers.push(this);
    }
    addTrack() {}
    async createOffer() {
      return { type: "offer", sdp: "offer" };
    }
    async setLocalDescription(description) {
      this.localDescription = description;
    }
    createDataChannel() {
      this.channel = { readyState: "connecting", send: (text) => this.socket.send(text) };
      return this.channel;
    }
    async setRemoteDescription() {
      const target = new URL("v1/realtime", url);
      target.protocol = "ws:";
      this.socket = new WebSocket(target, ["realtime"]);
      this.socket.onmessage = ({ data }) => this.channel.onmessage({ data });
      this.socket.onopen = () => {
        this.channel.readyState = "open";
        this.channel.onopen?.();
      };
    }
    /** What a browser reports about the connection. */
    become(state) {
      this.connectionState = state;
      this.onconnectionstatechange?.();
    }
    /** The server or its door is gone, which the browser has not noticed: nothing arrives on either side any more. */
    vanish() {
      this.socket.onmessage = null;
      this.socket.close();
      this.channel.send = () => {};
    }
    /** The server or its door is gone. */
    die(state) {
      this.vanish();
      this.channel.readyState = "closed";
      this.become(state);
    }
    close() {
      this.channel.readyState = "closed";
      this.socket?.close();
    }
  };
}
