// @ts-check
// Where the server is, and how it is asked.

import { refused, withKey } from "./errors.js";

/**
 * @typedef {object} ServerOptions
 * @property {string} [server] the root of the server, as https://voice.example/; without it, the page's own folder
 * @property {string | (() => string | Promise<string>)} [key] an API key or a client secret, where the server wants
 *   one; or what gives one, which is asked for each session
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
   * An HTTP request with the key.
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
   * @param {string} [needs] what the server may lack for it, for the error
   * @returns {Promise<WebSocket>}
   */
  async open(path, needs) {
    await this.renew();
    const url = this.url(path);
    url.protocol = url.protocol.replace("http", "ws");
    // A browser's WebSocket has no headers: the key goes as a subprotocol.
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

/** What tells of itself by events. @template {Record<string, any>} Told */
export class Teller extends EventTarget {
  /**
   * Call `listener` with what is told under this name; returns how to stop.
   * @template {keyof Told & string} Name
   * @param {Name} name
   * @param {(told: Told[Name]) => void} listener
   */
  on(name, listener) {
    const heard = (/** @type {Event} */ event) => listener(/** @type {CustomEvent} */ (event).detail);
    this.addEventListener(name, heard);
    return () => this.removeEventListener(name, heard);
  }
  /**
   * @template {keyof Told & string} Name
   * @param {Name} name
   * @param {Told[Name]} told
   */
  tell(name, told) {
    this.dispatchEvent(new CustomEvent(name, { detail: told }));
  }
}
