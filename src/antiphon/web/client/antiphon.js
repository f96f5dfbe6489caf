// @ts-check
// The client of antiphon for browsers: conversations, captions, speech, and questions about a camera or a screen.
// The page at / is built on it. README.md in this folder shows how to begin.

export { Captions, srt } from "./captions.js";
export { Conversation } from "./conversation.js";
export { ServerError } from "./errors.js";
export { SpokenText } from "./speech.js";
export { Watch } from "./watch.js";
