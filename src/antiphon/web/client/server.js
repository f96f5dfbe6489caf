// @ts-check
// The server's address and key, and requests to it.

import { refused, withKey } from "./errors.js";

/**
 * @typedef {object} ServerOptions
 * @property {string} [server] the root URL of the server, such as https://voice.example/; default: the page's folder
 * @property {string | (() => string | Promise<string>)} [key] an API key or a client secret, if the server needs one,
 *   or a function that returns one, which is called for each session
 */

export class Server {
  /** @param {ServerOptions} options */
  constructor({ server, key } = {}) {
    this.root = new URL(server ?? ".", location.href);
    if (!this.root.pathname.endsWith("/")) this.root.pathname += "/";
    this.give = typeof key === "function" ? key : null;
    this.key = typeof key === "string" ? key : "";
  }
  async renew() {
    if (this.give) this.key = await this.give();
  }
  /** @param {string} path */
  url(path) {
    return new URL(path, this.root);
  }
  /**
   * Send an HTTP request with the key.
   * @param {string} path
   * @param {{method?: string, headers?: Record<string, string>, body?: string, signal?: AbortSignal}} [init]
   */
  async fetch(path, init = {}) {
    await this.renew();
    return fetch(this.url(path), { ...init, headers: withKey(this.key, init.headers) });
  }
  /**
   * Open a WebSocket.
   * @param {string} path
   * @param {string} [needs] a reason why the server may refuse, for the error
   * @returns {Promise<WebSocket>}
   */
  async open(path, needs) {
    await this.renew();
    const url = this.url(path);
    url.protocol = url.protocol.replace("http", "ws");
    // A browser's WebSocket cannot set headers, so the key is sent as a subprotocol.
    const socket = new WebSocket(url, this.key ? ["realtime", `openai-insecure-api-key.${this.key}`] : ["realtime"]);
    return new Promise((resolve, reject) => {
      socket.onopen = () => {
        socket.onerror = null;
        resolve(socket);
      };
      socket.onerror = () => refused(this, needs).then(reject);
    });
  }
}

/** An object that emits typed events. @template {Record<string, any>} Details */
export class Teller extends EventTarget {
  /**
   * Call `listener` with the detail of each event of this name. Returns a function that removes the listener.
   * @template {keyof Details & string} Name
   * @param {Name} name
   * @param {(detail: Details[Name]) => void} listener
   */
  on(name, listener) {
    const heard = (/** @type {Event} */ event) => listener(/** @type {CustomEvent} */ (event).detail);
    this.addEventListener(name, heard);
    return () => this.removeEventListener(name, heard);
  }
  /**
   * @template {keyof Details & string} Name
   * @param {Name} name
   * @param {Details[Name]} detail
   */
  tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail: detail }));
  }
}
