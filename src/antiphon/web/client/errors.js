// @ts-check
// Error messages for users, which say what to do.

/** @type {Record<string, (what: string) => string>} */
const DEVICES = {
  NotAllowedError: (what) => `The ${what} is not allowed. Allow it in the address bar of the browser, then try again.`,
  NotFoundError: (what) => `No ${what} was found. Connect one, then try again.`,
  NotReadableError: (what) => `The ${what} is in use by another program. Close that program, then try again.`,
  OverconstrainedError: (what) => `The chosen ${what} is no longer available. Choose another one in the options.`,
};
const AGAIN = "Try again in a moment.";
export const NO_KEY = "This server needs an API key.";
export const WRONG_KEY = "The API key is wrong.";
export const INSECURE =
  "Browsers allow the microphone and the camera only on https pages and on localhost. Open this page with https.";

/**
 * A refusal of the server or the browser. `code`: the server's error code, or ""; `lasting`: a retry would fail too.
 */
export class ServerError extends Error {
  /**
   * @param {string} message
   * @param {string} [code]
   * @param {boolean} [lasting]
   */
  constructor(message, code = "", lasting = false) {
    super(message);
    this.code = code;
    this.lasting = lasting;
  }
}

/**
 * Ask for a device. `what` names it in error messages, such as "microphone".
 * @param {string} what
 * @param {(media: MediaDevices) => Promise<MediaStream>} ask
 */
export async function device(what, ask) {
  if (!navigator.mediaDevices) throw new Error(INSECURE);
  try {
    return await ask(navigator.mediaDevices);
  } catch (error) {
    const said = DEVICES[/** @type {Error} */ (error).name];
    throw said ? new Error(said(what), { cause: error }) : error;
  }
}

/**
 * @param {string} key
 * @param {Record<string, string>} [headers]
 * @returns {Record<string, string>}
 */
export function withKey(key, headers = {}) {
  return key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
}

/**
 * The error of an unsuccessful HTTP response.
 * @param {Response} answer
 * @param {string} key
 */
export async function failed(answer, key) {
  if (answer.status === 401) return new ServerError(key ? WRONG_KEY : NO_KEY, "invalid_api_key", true);
  const text = await answer.text();
  let said = "",
    code = "";
  try {
    ({ message: said = "", code = "" } = JSON.parse(text).error ?? {});
  } catch {
    /* not JSON: a proxy's page */
  }
  if (answer.status === 429 || answer.status === 503)
    return new ServerError(`The server is full or not ready. ${said} ${AGAIN}`.replace("  ", " "), code);
  return new ServerError(said || `The server answered with status ${answer.status}. ${AGAIN}`, code);
}

/**
 * Find out why a WebSocket was refused. Browsers hide the reason from pages, so this sends ordinary requests.
 * @param {import("./server.js").Server} server
 * @param {string} [needs]
 */
export async function refused(server, needs = "") {
  try {
    const ready = await (await fetch(server.url("ready"))).json();
    if (ready.status !== "ready") return new ServerError(`The server is not ready: ${ready.status}. ${AGAIN}`);
    const models = await server.fetch("v1/models");
    if (!models.ok) return await failed(models, server.key);
  } catch {
    return new ServerError("The server does not answer. Check that it is running, then try again.");
  }
  return new ServerError(`The server did not accept the connection. It is full${needs && `, or ${needs}`}. ${AGAIN}`);
}
