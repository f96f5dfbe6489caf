// What went wrong, in words that say what to do about it.

const DEVICES = {
  NotAllowedError: (what) => `The ${what} is not allowed. Allow it in the address bar of the browser, then try again.`,
  NotFoundError: (what) => `No ${what} was found. Connect one, then try again.`,
  NotReadableError: (what) => `The ${what} is in use by another program. Close that program, then try again.`,
  OverconstrainedError: (what) => `The chosen ${what} is not there any more. Choose another one in the options.`,
};
const AGAIN = "Try again in a moment.";
export const NO_KEY = "This server wants an API key. Enter it at the top of this page.";
export const WRONG_KEY = "The API key is wrong. Correct it at the top of this page.";
export const INSECURE =
  "A browser gives the microphone and the camera only to https pages and to localhost. Open this page by https.";

/** Ask for a device. What the browser refuses is said of `what`, for one "microphone". */
export async function device(what, ask) {
  if (!navigator.mediaDevices) throw new Error(INSECURE);
  try {
    return await ask(navigator.mediaDevices);
  } catch (error) {
    throw DEVICES[error.name] ? new Error(DEVICES[error.name](what), { cause: error }) : error;
  }
}

export function withKey(key, headers = {}) {
  return key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
}

/** The error of an HTTP answer that is none of success. */
export async function failed(answer, key) {
  if (answer.status === 401) return new Error(key ? WRONG_KEY : NO_KEY);
  const text = await answer.text();
  let said = "";
  try {
    said = JSON.parse(text).error?.message ?? "";
  } catch {
    /* not JSON: a proxy's page */
  }
  if (answer.status === 429 || answer.status === 503)
    return new Error(`The server is full or not ready. ${said} ${AGAIN}`.replace("  ", " "));
  return new Error(said || `The server answered with status ${answer.status}. ${AGAIN}`);
}

/** Why a WebSocket was refused: a browser does not tell a page, so the server is asked in another way. */
export async function refused(key, needs = "") {
  try {
    const ready = await (await fetch("ready")).json();
    if (ready.status !== "ready") return new Error(`The server is not ready: ${ready.status}. ${AGAIN}`);
    const models = await fetch("v1/models", { headers: withKey(key) });
    if (!models.ok) return await failed(models, key);
  } catch {
    return new Error("The server does not answer. See whether it runs, then try again.");
  }
  return new Error(`The server did not accept the connection. It is full${needs && `, or ${needs}`}. ${AGAIN}`);
}

/** Open a WebSocket. `needs`: what the server may lack for it. */
export function openSocket(url, protocols, key, needs) {
  const socket = new WebSocket(url, protocols);
  return new Promise((resolve, reject) => {
    socket.onopen = () => {
      socket.onerror = null;
      resolve(socket);
    };
    socket.onerror = () => refused(key, needs).then(reject);
  });
}
